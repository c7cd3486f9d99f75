"""Refs: stage key → artifact, with the artifact's inputs and provenance."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.frozen import Frozen
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.stage_key import stage_key as hash_key_parts
from vantage.storage.measured_file import read_sealed, write_measured
from vantage.storage.sealed_folders import seal

_ARTIFACT: TypeAdapter[Artifact] = TypeAdapter(Artifact)
_STORE_FIELDS = {"uri", "digest", "files_digest", "stage_key"}


class DamagedRef(ValueError):
    """A ref that cannot be read, or that belongs to another stage key."""


class DamagedObject(ValueError):
    """A stored object that is missing, or whose bytes do not match its digest."""


class Ref(Frozen):
    """The artifact of a stage key."""

    artifact: Artifact
    attempt: int
    run_id: str
    """The run that produced the artifact."""
    key_parts: dict[str, Any]
    """The value whose hash is the stage key (``vantage.schemas.records.stage_key``)."""
    provenance: dict[str, Any]
    """Provenance, recorded but not in the stage key: code, library versions, device, threads."""

    def serves(self, run_id: str) -> bool:
        """Return whether a run may take the artifact for the whole stage: an artifact that a person ended early belongs
        only to its own run."""
        ended = self.artifact.ended_early
        return ended is None or ended.by != "hand" or run_id == self.run_id


@dataclass(frozen=True)
class Lookup:
    """Result of a lookup of a stage key: an intact artifact, nothing, or a damaged artifact."""

    ref: Ref | None
    """The ref of an intact artifact; None: the stage has to run."""
    damage: tuple[str, ...] = ()
    """Reasons why a stored artifact cannot be used; empty if there is no artifact, or it is intact."""


def uri_of(digest: str) -> str:
    """Return the path of an object, relative to the store."""
    return f"objects/{digest}"


def check_ref(ref: Ref, *, stage_key: str, where: str) -> Ref:
    """Return the ref, if it belongs to the stage key and to the object that it names.

    Args:
        where: the ref's path, for the message.

    Raises:
        DamagedRef: the ref belongs to another key or object.
    """
    artifact = ref.artifact
    try:
        key_of_parts = hash_key_parts(ref.key_parts)
    except ValueError as error:
        raise DamagedRef(f"{where}: cannot be read as a ref") from error
    if artifact.stage_key != stage_key or key_of_parts != stage_key:
        raise DamagedRef(f"{where}: holds the ref of another stage key")
    if artifact.uri != uri_of(artifact.digest):
        raise DamagedRef(f"{where}: artifact.uri={artifact.uri!r} is not {uri_of(artifact.digest)!r}")
    return ref


def seal_as(
    folder: Path,
    *,
    stage_key: str,
    attempt: int,
    run_id: str,
    description: Mapping[str, Any],
    key_parts: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Ref:
    """Seal the files of a stage together with its metrics, and return the ref that would point to them.

    Raises:
        ValueError: folder, key or description is invalid (``UnsafePath``: a file is).
        FileNotFoundError: the folder is gone.
    """
    if hash_key_parts(key_parts) != stage_key:
        raise ValueError(
            f"key_parts do not hash to stage_key={stage_key[:12]}…; use vantage.schemas.records.stage_key.stage_key"
        )
    canonical_json(provenance)
    placeholder = "0" * 64
    described = describe(description, stage_key=stage_key, digest=placeholder, files_digest=placeholder)
    write_measured(folder, described)
    digest = seal(folder)
    files_digest = read_sealed(folder, digest=digest).files_digest
    return Ref(
        artifact=describe(description, stage_key=stage_key, digest=digest, files_digest=files_digest),
        attempt=attempt,
        run_id=run_id,
        key_parts=dict(key_parts),
        provenance=dict(provenance),
    )


def describe(description: Mapping[str, Any], *, stage_key: str, digest: str, files_digest: str) -> Artifact:
    """Return the artifact with a stage's description and the fields that the store sets.

    Raises:
        ValueError: the description is invalid, or has a field that the store sets.
    """
    taken = _STORE_FIELDS & set(description)
    if taken:
        raise ValueError(f"description gives {', '.join(sorted(taken))}, which the store sets; leave it out")
    by_store = {"uri": uri_of(digest), "digest": digest, "files_digest": files_digest, "stage_key": stage_key}
    return _ARTIFACT.validate_python({**description, **by_store})
