"""``vantage export --push``: send an exported folder that passed its audit to a hub or a bucket, and read it back."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.review.exports.exporting import CARD
from vantage.runs.workspace import Workspace
from vantage.schemas.records.audit import AuditReport
from vantage.storage.bucket import SCHEMES, address_forms
from vantage.storage.hashed_files import chunks_of

_ON_A_HUB = re.compile(r"hub:([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})")


class PushRefused(ValueError):
    """Nothing was published; the message has the reason and the remedy."""


@dataclass(frozen=True)
class Place:
    """The place to which a model is pushed."""

    address: str
    """``hub:ORG/NAME`` or a bucket's address, as it was given."""
    repository: str | None = None
    """``ORG/NAME`` of a hub's repository; None: the place is a bucket."""

    @property
    def name_in_card(self) -> Path:
        """Return the name by which the card's commands load the model."""
        return Path(self.repository or self.address.rstrip("/").rpartition("/")[2])


class Pushed(Protocol):
    """A place that is being written."""

    def send(self, folder: Path, files: Mapping[str, str]) -> str:
        """Publish the files, complete or not at all; returns the address of what was published.

        Args:
            folder: the files.
            files: path → sha256, which the bytes that are read back must have.

        Raises:
            PushRefused: the place has other files, or gives back other bytes.
        """


def place_named(text: str) -> Place:
    """Return the place of ``--push``.

    Raises:
        PushRefused: the text names no place; the message lists the forms.
    """
    scheme, has_scheme, rest = text.partition("://")
    if on_a_hub := _ON_A_HUB.fullmatch(text):
        return Place(text, repository=on_a_hub[1])
    if has_scheme and scheme in SCHEMES and "/" in rest.strip("/"):
        return Place(text.rstrip("/"))
    forms = ", ".join(("hub:ORG/NAME", *address_forms()))
    raise PushRefused(
        f"--push={text[:200]!r} is no place for a model; write one of {forms}, with a prefix of its own in a bucket, and give the "
        "login in the environment"
    )


def push(folder: Path, place: Place, workspace: Workspace) -> tuple[str, AuditReport]:
    """Audit an exported folder and send it; returns the address of what was published, and the audit.

    The files are hashed before the audit reads them, and compared with what the place gives back. So a file that changes in
    between is never published as audited.

    Raises:
        PushRefused: the audit found something wrong, or see ``Pushed.send``.
    """
    files = hashed(folder)
    with Evidence(workspace) as evidence:
        report = audit(evidence, str(folder))
    if report.outcome == "wrong":
        raise PushRefused(
            f"nothing was sent to {place.address}: the audit found {_wrong(report)}; `vantage audit` shows all of it"
        )
    return _open(place).send(folder, files), report


def hashed(folder: Path) -> dict[str, str]:
    """Return path → sha256 of every file of a folder, at any depth."""
    paths = sorted(Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix(): sha256_of(chunks_of(path)) for path in paths}


def sha256_of(chunks: Iterable[bytes | memoryview]) -> str:
    """Return the sha256 of all chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def card_last(files: Iterable[str]) -> list[str]:
    """Return the paths; the card, by which others find the model, is the last."""
    return sorted(files, key=lambda path: (path == CARD, path))


def _open(place: Place) -> Pushed:
    if place.repository is not None:
        from vantage.review.exports.push_to_hub import HubRepository

        return HubRepository(place.repository)
    from vantage.review.exports.push_to_bucket import BucketPrefix

    return BucketPrefix(place.address)


def _wrong(report: AuditReport) -> str:
    found = [
        f"{where}: {check.subject}: {check.detail}"
        for where, check in report.every_check()
        if check.outcome == "wrong"
    ]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}"
