"""Refs: stage key → artifact, with the artifact's inputs and provenance."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from schemas.frozen import Frozen
from schemas.records.artifacts import Artifact

_ARTIFACT: TypeAdapter[Artifact] = TypeAdapter(Artifact)
_STORE_FIELDS = {"uri", "digest", "files_digest", "stage_key"}


class DamagedRef(ValueError):
    """A ref that cannot be read, or that belongs to another stage key."""


class Ref(Frozen):
    """The artifact of a stage key."""

    artifact: Artifact
    attempt: int
    run_id: str
    """The run that produced the artifact."""
    key_parts: dict[str, Any]
    """The value whose hash is the stage key (``schemas.records.stage_key``)."""
    provenance: dict[str, Any]
    """Recorded but not in the stage key: code, library versions, device, threads."""


@dataclass(frozen=True)
class Lookup:
    """Result of a lookup of a stage key: an intact artifact, nothing, or a damaged artifact."""

    ref: Ref | None
    """The ref of an intact artifact; None: the stage has to run."""
    damage: tuple[str, ...] = ()
    """Why a stored artifact cannot be used; empty if there is none, or it is intact."""


def uri_of(digest: str) -> str:
    """Path of an object, relative to the store."""
    return f"objects/{digest}"


def describe(description: Mapping[str, Any], *, stage_key: str, digest: str, files_digest: str) -> Artifact:
    """The artifact with a stage's description and the fields that the store sets.

    Raises:
        ValueError: the description is invalid, or has a field that the store sets.
    """
    taken = _STORE_FIELDS & set(description)
    if taken:
        raise ValueError(f"description gives {', '.join(sorted(taken))}, which the store sets; leave it out")
    by_store = {"uri": uri_of(digest), "digest": digest, "files_digest": files_digest, "stage_key": stage_key}
    return _ARTIFACT.validate_python({**description, **by_store})
