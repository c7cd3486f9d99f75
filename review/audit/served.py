"""Check the files that MLflow serves for a model: whether they are where they were published, and every byte of them."""

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vantage.ledger.published_copies import is_same_place, local_folder
from vantage.ledger.tracking import without_password
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.mlflow_copies import problems_of_folder
from vantage.review.audit.sent import num_destinations
from vantage.runs.record import RunRecord
from vantage.runs.view import Missing
from vantage.schemas.records.audit import Check
from vantage.storage.read_only import Hashed

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import LoggedModel, MlflowVersion

_SAID_TAGS = ("vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id")


@dataclass(frozen=True)
class _Place:
    """The files that were read at one address."""

    hashed: Hashed
    is_empty: bool
    """Whether there is no folder, or no file in it."""


@dataclass(frozen=True)
class _Served:
    """The files that were read at an address, and those of a moved workspace."""

    hashed: Hashed | Missing
    note: str = ""
    """Remark that the workspace was moved; empty: it was not."""


def copy_check(evidence: Evidence, version: "MlflowVersion") -> Check:
    """Compare every byte that MLflow loads for a version, and the address that it loads them from."""
    subject = f"copy {version.name}/{version.version}"
    problems = list(_address_problems(evidence, version))
    digest = version.tags["vantage.digest"]
    if not version.location:
        return Check(subject=subject, outcome="wrong", detail="; ".join(problems))
    if problems and not _is_local(version.location):
        return Check(subject=subject, outcome="wrong", detail=f"{'; '.join(problems)}; it was not fetched")
    served = _read(evidence, version.location, digest, version.tags, is_expected=not problems)
    if isinstance(served.hashed, Missing):
        if problems:
            return Check(subject=subject, outcome="wrong", detail="; ".join(problems))
        return check_of(subject, served.hashed)
    problems += served.hashed.problems
    if problems:
        return Check(subject=subject, outcome="wrong", detail="; ".join(problems))
    read = f"{served.hashed.num_files} files, {served.hashed.num_bytes:,} bytes"
    if note := served.note or _otherwise_recorded(evidence, version):
        return Check(subject=subject, outcome="note", detail=f"{note}; {read}")
    return Check(subject=subject, detail=read)


def logged_model_problems(
    evidence: Evidence, model_id: str, model: "LoggedModel", tags: Mapping[str, str], *, is_pending: bool
) -> Iterator[str]:
    """Yield problems of the files that MLflow loads for ``models:/m-ID``.

    Args:
        tags: of the run that made the model.
        is_pending: MLflow may not have all operations yet, so a copy may be half made.
    """
    from vantage.ledger.to_mlflow.logged_models import EXTERNAL

    if not model.location:
        yield "MLflow finds no files of it"
        return
    expected = f"{model.root.rstrip('/')}/models/{model_id}/artifacts"
    if not is_same_place(model.location, expected) and not _is_inside(evidence, model.location, model_id):
        yield f"MLflow loads it from {_shown(model.location)}, and its experiment keeps it in {_shown(expected)}"
        if not _is_local(model.location):
            return
    elif is_pending and EXTERNAL in model.tags:
        return
    digest = tags.get("vantage.digest", "")
    served = _read(evidence, model.location, digest, tags, is_expected=True, may_be_absent=True)
    if not isinstance(served.hashed, Missing):
        yield from (f"MLflow loads it from files that differ: {each}" for each in served.hashed.problems[:3])


def _address_problems(evidence: Evidence, version: "MlflowVersion") -> Iterator[str]:
    """Yield problems of the address from which MLflow loads a version."""
    from vantage.ledger.to_mlflow.served_files import leads_nowhere

    location, shown = version.location, _shown(version.location)
    if not location:
        yield "MLflow finds no files of it"
        return
    if leads_nowhere(location):
        yield f"its address leads from one model to another, to {shown}, and MLflow loads nothing"
        return
    if (said := _otherwise_recorded(evidence, version)) and not isinstance(said, Missing):
        yield said
    if not is_same_place(version.source, location):
        yield f"its source is {_shown(version.source)}, and MLflow loads it from {shown}"
    if version.model_location is not None and not is_same_place(version.model_location, location):
        yield f"MLflow loads it from {shown}, and its logged model from {_shown(version.model_location)}"


def _otherwise_recorded(evidence: Evidence, version: "MlflowVersion") -> str | Missing:
    """Return another address at which a run published a version; empty: this one is recorded, or none is.

    ``Missing``: the run was sent to several databases of MLflow, and has recorded the place in another one.
    """
    recorded = _recorded(evidence, version)
    if any(_is_same_or_moved(evidence, version.location, place) for place in recorded.values()):
        return ""
    for run_id, place in recorded.items():
        said = f"MLflow loads it from {_shown(version.location)}, and run {run_id} published it to {_shown(place)}"
        if num_destinations(evidence, run_id) > 1:
            return Missing(f"{said}, in another database of MLflow")
        return said
    return ""


def _recorded(evidence: Evidence, version: "MlflowVersion") -> dict[str, str]:
    """Return run → address at which it published the version's artifact under this name."""
    found: dict[str, str] = {}
    for run_id in evidence.run_ids:
        record = evidence.record(run_id)
        copy = record.copies.get(version.name) if isinstance(record, RunRecord) else None
        if copy is not None and copy.digest == version.tags.get("vantage.digest"):
            found[run_id] = copy.location
    return found


def _read(
    evidence: Evidence,
    location: str,
    digest: str,
    tags: Mapping[str, str],
    *,
    is_expected: bool,
    may_be_absent: bool = False,
) -> _Served:
    """Read every byte at an address, and of a moved workspace's own files; each place is read once.

    Args:
        is_expected: the files were published there; else a copy in the workspace is not looked at.
        may_be_absent: an address without files is right too.
    """
    inside = evidence.server.moved_to(location) if is_expected else None
    if inside is None:
        return _Served(_hashed(evidence, location, digest, tags, may_be_absent=may_be_absent))
    here = _hashed(evidence, inside.as_uri(), digest, tags, may_be_absent=may_be_absent)
    moved = f"the workspace was moved: MLflow loads it from {_shown(location)}"
    if not _is_there(location):
        return _Served(
            here, f"{moved}, where there are no files any longer; those of the workspace are as published"
        )
    there = _hashed(evidence, location, digest, tags, may_be_absent=may_be_absent)
    if isinstance(here, Missing) or isinstance(there, Missing):
        return _Served(here if isinstance(here, Missing) else there, moved)
    both = (*here.problems, *(f"{_shown(location)}: {each}" for each in there.problems))
    return _Served(
        Hashed(both, there.num_files, there.num_bytes),
        f"{moved}, whose files are as published, and so are those of the workspace",
    )


def _hashed(
    evidence: Evidence, location: str, digest: str, tags: Mapping[str, str], *, may_be_absent: bool
) -> Hashed | Missing:
    said = {name: tags[name] for name in _SAID_TAGS if name in tags}

    def read() -> _Place | Missing:
        from vantage.ledger.to_mlflow.served_files import UnboundedFiles

        def at(folder: Path) -> _Place:
            if why := _why_no_path(folder):
                return _Place(Hashed((f"its address cannot be a folder's path ({why})",)), is_empty=False)
            is_empty = not (folder.is_dir() and any(folder.iterdir()))
            return _Place(problems_of_folder(evidence, folder, digest, said), is_empty)

        def ask(server: object) -> _Place:
            with evidence.server.files_at(location, digest=digest) as folder:
                return at(folder)

        try:
            return evidence.ask(ask)
        except UnboundedFiles as error:
            return _Place(Hashed((str(error),)), is_empty=False)
        except PermissionError as error:
            return Missing(f"{error.filename} must not be read by this user; audit as one who may")

    place = evidence.once(("served", location, digest, tuple(said.items())), read)
    if isinstance(place, Missing):
        return place
    return Hashed(()) if may_be_absent and place.is_empty else place.hashed


def _is_same_or_moved(evidence: Evidence, location: str, recorded: str) -> bool:
    """Return whether an address is the recorded one, or that of the same model in this workspace, moved with its database."""
    from vantage.ledger.to_mlflow.logged_models import model_in

    model_id = model_in(f"{recorded}/")
    return is_same_place(location, recorded) or (
        model_id is not None and _is_inside(evidence, location, model_id)
    )


def _is_inside(evidence: Evidence, location: str, model_id: str) -> bool:
    """Return whether this workspace keeps the files of a model at this address."""
    return is_same_place(
        location,
        (evidence.workspace.root.absolute() / "mlartifacts/models" / model_id / "artifacts").as_uri(),
    )


def _is_local(location: str) -> bool:
    return local_folder(location) is not None


def _is_there(location: str) -> bool:
    folder = local_folder(location)
    try:
        return folder is not None and not _why_no_path(folder) and folder.is_dir()
    except PermissionError:
        return True  # it may exist, so it counts as there


def _why_no_path(folder: Path) -> str:
    """Return the reason why no folder can have this path; empty: one can."""
    try:
        folder.is_dir()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return os.strerror(errno.ENAMETOOLONG)
        raise
    return ""


def _shown(location: str) -> str:
    return without_password(location)[:200] or "nowhere"
