"""Audit a folder: an object of a store, a copy of one, an exported model, MLflow's copy of a version."""

import json
import re
import stat
from collections.abc import Iterator, Mapping, Set
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from vantage.ledger.published_copies import EXAMPLES, TOKENIZER, WEIGHTS, belongs_to_tokenizer
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.exported_cards import exported_card_checks
from vantage.review.audit.exported_signatures import exported_signature_checks, signature_files
from vantage.review.audit.mlflow_copies import problems_of_folder
from vantage.review.audit.mlflow_descriptions import (
    DESCRIPTION,
    description_problems,
    example_problems,
    kinds_of,
)
from vantage.review.audit.walk import Walk
from vantage.review.exports.exporting import GENERATION
from vantage.runs.named_models import PROVENANCE_FILE
from vantage.runs.record import RunRecord
from vantage.runs.view import Missing
from vantage.runs.workspace import RunError
from vantage.schemas.records.audit import Check
from vantage.storage.hashed_files import FileToHash, chunks_of, hash_all
from vantage.storage.measured_file import METRICS_FILE
from vantage.storage.read_only import hash_listed, list_folder
from vantage.storage.refs import Ref
from vantage.storage.sealed_folders import MANIFEST

_Value = TypeVar("_Value")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WRITTEN_ANEW = (
    "README.md",
    GENERATION,
    "MLmodel",
    "requirements.txt",
    "python_env.yaml",
    *EXAMPLES,
    PROVENANCE_FILE,
)
"""Files of an exported folder that are not the artifact's own."""
_LEFT_OUT = frozenset({METRICS_FILE, GENERATION})
"""Files of an artifact that an export leaves out, or writes again."""


def add_folder(evidence: Evidence, walk: Walk, path: Path) -> tuple[str, list[Check]]:
    """Check a folder's own files, and add its artifact to the walk; returns a description in words, and the checks.

    Raises:
        RunError: the path is no folder, or a folder without a list of its content.
    """
    if not path.is_dir():
        raise RunError(
            f"{path} is no folder; name an artifact's folder, an exported one, a run, a digest or a registered model"
        )
    if (path / MANIFEST).is_file():
        return _sealed(evidence, walk, path)
    if (path / PROVENANCE_FILE).is_file():
        return _exported(evidence, walk, path)
    if (path / WEIGHTS / MANIFEST).is_file():
        return _copy(evidence, walk, path)
    if (path / "runs").is_dir() and (path / "store").is_dir():
        raise RunError(
            f"{path} is a workspace; name what to audit in it: vantage audit latest --workspace {path}"
        )
    raise RunError(
        f"{path} has neither {MANIFEST} nor {PROVENANCE_FILE}, so there is no list of what it must hold; name an artifact's folder, an "
        "exported one, or a run"
    )


def _sealed(evidence: Evidence, walk: Walk, path: Path) -> tuple[str, list[Check]]:
    """Check a folder with a manifest: its digest is the manifest's sha256, whatever the folder's name is."""
    digest = _sha256(path / MANIFEST)
    hashed = hash_listed({"folder": list_folder(path, digest=None)}, evidence.clock)["folder"]
    problems = list(hashed.problems)
    name = path.absolute().name
    if _DIGEST.fullmatch(name) and name != digest:
        problems.append(
            f"the folder is named {name[:12]}, and its manifest's sha256 is {digest[:12]}: the manifest was rewritten"
        )
    detail = "; ".join(problems) or f"{hashed.num_files} files, {hashed.num_bytes:,} bytes"
    checks = [Check(subject="folder", outcome="wrong" if problems else "ok", detail=detail)]
    return f"folder {path}", [*checks, *_go_on(evidence, walk, name if _DIGEST.fullmatch(name) else digest)]


def _copy(evidence: Evidence, walk: Walk, path: Path) -> tuple[str, list[Check]]:
    """Check MLflow's copy of a version."""
    digest = _sha256(path / WEIGHTS / MANIFEST)
    hashed = problems_of_folder(evidence, path, digest, {"vantage.digest": digest})
    detail = "; ".join(hashed.problems) or f"{WEIGHTS} and {TOKENIZER}, {hashed.num_bytes:,} bytes"
    check = Check(subject="folder", outcome="wrong" if hashed.problems else "ok", detail=detail)
    return f"folder {path}", [check, *_go_on(evidence, walk, digest)]


def _exported(evidence: Evidence, walk: Walk, path: Path) -> tuple[str, list[Check]]:
    """Check a folder that ``vantage export`` wrote: its files against its own list, and the list against the artifact."""
    try:
        provenance: dict[str, Any] = json.loads((path / PROVENANCE_FILE).read_bytes())
        files, digest, parents = (
            _named(provenance["files"], str),
            str(provenance["digest"]),
            _named(provenance["parents"], dict),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(
            f"{path / PROVENANCE_FILE} cannot be read ({type(error).__name__}); export the model again"
        ) from None
    if not _DIGEST.fullmatch(digest):
        raise RunError(f"{path / PROVENANCE_FILE}: digest {digest!r} is no digest; export the model again")
    problems = [
        *_file_problems(evidence, path, files, beside=signature_files(provenance)),
        *example_problems(path),
    ]
    if (path / DESCRIPTION).exists():
        names = ("digest", "stage_key", "stage", "run_id")
        tags = {f"vantage.{name}": str(provenance.get(name)) for name in names}
        kinds = kinds_of(evidence, digest)
        problems += description_problems(path, path, tags, kinds=kinds, weights_at=".", any_params=True)
    detail = "; ".join(problems) or f"{len(files)} files as {PROVENANCE_FILE} lists them"
    checks = [Check(subject="folder", outcome="wrong" if problems else "ok", detail=detail)]
    checks += exported_signature_checks(path, provenance, digest)
    checks += _against_artifact(evidence, path, provenance, files, digest, parents)
    return f"exported folder {path}", [*checks, *_go_on(evidence, walk, digest)]


def _named(value: object, kind: type[_Value]) -> dict[str, _Value]:
    """Return a JSON object whose values all have one type; raises TypeError for any other value."""
    if not isinstance(value, dict) or not all(isinstance(each, kind) for each in value.values()):
        raise TypeError(f"no object of {kind.__name__}")
    return value


def _go_on(evidence: Evidence, walk: Walk, digest: str) -> Iterator[Check]:
    """Go on with the walk in the workspace, if that has the artifact."""
    known = digest in evidence.refs_of or evidence.has_object(digest) or _is_recorded(evidence, digest)
    if known:
        walk.add_digest(digest)
        return
    said = (
        f"{evidence.workspace.address} knows no artifact {digest[:12]}: what it was made of, by which run and with which gates "
        "is not checked; name the workspace that made it with --workspace"
    )
    yield Check(subject="lineage", outcome="unchecked", detail=said)


def _is_recorded(evidence: Evidence, digest: str) -> bool:
    records = (evidence.record(run_id) for run_id in evidence.run_ids)
    return any(
        stage.digest == digest for record in records for stage in getattr(record, "stages", {}).values()
    )


def _file_problems(
    evidence: Evidence, path: Path, files: Mapping[str, str], *, beside: Set[str]
) -> Iterator[str]:
    """Yield differences of the folder's files from the sha256 in ``vantage.json``; the files ``beside`` are checked
    elsewhere."""
    present = {
        file.relative_to(path).as_posix(): file
        for file in sorted(path.rglob("*"))
        if file.is_symlink() or not file.is_dir()
    }
    for name in sorted(files.keys() - present.keys()):
        yield f"{name}: is missing"
    # MLflow's copy of the tokenizer has the same files once more
    again = {f"{TOKENIZER}/{name}": sha for name, sha in files.items() if belongs_to_tokenizer(name)}
    anew = {f"{TOKENIZER}/{name}" for name in _WRITTEN_ANEW}
    for name in sorted(present.keys() - files.keys() - again.keys() - beside):
        if name not in _WRITTEN_ANEW and name not in anew:
            yield f"{name}: is not in {PROVENANCE_FILE}"
    for name in sorted(anew & present.keys()):
        own = path / name.removeprefix(f"{TOKENIZER}/")
        plain = _is_plain(present[name]) and own.is_file()
        if not plain or present[name].read_bytes() != own.read_bytes():
            yield f"{name}: differs from {own.name}"
    files = {**again, **files}
    for name in sorted(name for name in present.keys() & files.keys() if not _is_plain(present[name])):
        yield f"{name}: is a link or no plain file"
    listed = sorted(name for name in present.keys() & files.keys() if _is_plain(present[name]))
    to_hash = [
        FileToHash(name, present[name].lstat().st_size, lambda file=present[name]: chunks_of(file))  # type: ignore[misc]
        for name in listed
    ]
    for name, sha in zip(listed, hash_all(to_hash, evidence.clock), strict=True):
        if isinstance(sha, OSError):
            yield f"{name}: cannot be read: {sha}"
        elif sha != files[name]:
            yield f"{name}: sha256 is {sha}, must be {files[name]}"


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _against_artifact(
    evidence: Evidence,
    path: Path,
    provenance: Mapping[str, Any],
    files: Mapping[str, str],
    digest: str,
    parents: Mapping[str, Any],
) -> Iterator[Check]:
    """Compare the content of ``vantage.json`` with the artifact in the workspace that it names."""
    refs = evidence.refs_of.get(digest, [])
    if not refs or not evidence.has_object(digest):
        return  # the checks of the artifact itself report this
    ref = next((each for each in refs if each.artifact.stage_key == provenance.get("stage_key")), None)
    if ref is None:
        own, said = refs[0].artifact.stage_key, str(provenance.get("stage_key"))
        detail = f"stage_key is {said[:12]}, the artifact's is {own[:12]}"
        yield Check(subject=PROVENANCE_FILE, outcome="wrong", detail=detail)
        return
    base, merged_into = getattr(ref.artifact, "base", None), provenance.get("merged_into")
    problems = [
        *_provenance_problems(provenance, ref, parents),
        *_gate_problems(evidence, provenance, digest),
    ]
    if merged_into is None:
        problems += _listed_problems(evidence, files, digest)
    elif merged_into != base:
        problems.append(f"merged_into is {str(merged_into)[:12]}, the artifact's base is {str(base)[:12]}")
    else:
        said = f"its files are the artifact merged into {base[:12]}, compared with its own list alone"
        problems.append(Missing(said))
    yield from exported_card_checks(evidence, path, provenance, ref.artifact)
    missing = [each for each in problems if isinstance(each, Missing)]
    if wrong := [each for each in problems if not isinstance(each, Missing)]:
        yield Check(subject=PROVENANCE_FILE, outcome="wrong", detail="; ".join(wrong))
    elif missing:
        yield Check(subject=PROVENANCE_FILE, outcome="unchecked", detail="; ".join(missing))
    else:
        yield Check(subject=PROVENANCE_FILE, detail="as the artifact in the workspace")


def _listed_problems(evidence: Evidence, files: Mapping[str, str], digest: str) -> Iterator[str]:
    """Yield differences of the list of files from the artifact's manifest, except files that an export leaves out."""
    assert evidence.store is not None, "it has the artifact"
    listed = evidence.store.listed(digest).files
    for name, sha in files.items():
        if listed.get(name) != sha:
            artifacts = str(listed.get(name, "has no such file"))[:12]
            yield f"{name}: {PROVENANCE_FILE} says sha256 {sha[:12]}, the artifact {artifacts}"
    for name in sorted(listed.keys() - files.keys() - _LEFT_OUT):
        yield f"{name}: is in the artifact, and not in {PROVENANCE_FILE}"


def _gate_problems(evidence: Evidence, provenance: Mapping[str, Any], digest: str) -> Iterator[str]:
    """Yield differences of the verdicts from those of the runs that have recorded the artifact."""
    records = (evidence.record(run_id) for run_id in evidence.run_ids)
    recorded = [
        [str(verdict) for verdict in stage.verdicts]
        for record in records
        if isinstance(record, RunRecord)
        for stage in record.stages.values()
        if stage.digest == digest
    ]
    gates, run_id = provenance.get("gates"), str(provenance.get("run_id"))
    if gates in recorded:
        return
    if recorded and run_id in evidence.run_ids:
        yield f"gates are {str(gates)[:120]}, and no run has recorded these"
    else:
        yield Missing(
            f"run {run_id[:40]} is not in {evidence.workspace.address}, so its gates are not compared"
        )


def _provenance_problems(
    provenance: Mapping[str, Any], ref: Ref, parents: Mapping[str, Any]
) -> Iterator[str]:
    expected = dict(sorted(ref.artifact.parents.items()))
    given = {role: each.get("digest") for role, each in parents.items() if isinstance(each, dict)}
    for role in dict.fromkeys((*expected, *given)):
        if expected.get(role) != given.get(role):
            yield f"parent {role} is {str(given.get(role))[:12]}, the artifact's is {str(expected.get(role))[:12]}"
    metrics = provenance.get("metrics") or {}
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if ref.artifact.metrics.get(name) != value:
            yield f"metric {name} is {value}, the artifact's is {ref.artifact.metrics.get(name)}"


def _sha256(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
