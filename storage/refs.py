"""A stage key's ref: which artifact it stands for, and what that was made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from schemas.frozen import Frozen
from schemas.records.artifacts import Artifact

_ARTIFACT: TypeAdapter[Artifact] = TypeAdapter(Artifact)
_SET_BY_THE_STORE = {"uri", "digest", "files_digest", "stage_key"}


class DamagedRef(ValueError):
    """A ref that cannot be read, or does not say what its name says."""


class Ref(Frozen):
    """Which artifact a stage key stands for."""

    artifact: Artifact
    attempt: int
    run_id: str
    """The run that produced the artifact."""
    key_parts: dict[str, Any]
    """What was hashed into the stage key (``schemas.records.stage_key``)."""
    provenance: dict[str, Any]
    """What is recorded but not hashed: code, library versions, device, threads."""


@dataclass(frozen=True)
class Lookup:
    """What the store has for a stage key: an intact artifact, nothing, or damage that has to be told."""

    ref: Ref | None
    """The artifact, every file of which is as it was committed; None: the stage has to run."""
    damage: tuple[str, ...] = ()
    """Why an artifact that was there cannot be used; empty where there was none, or it is intact."""


def uri_of(digest: str) -> str:
    """Where an object lies, relative to the store."""
    return f"objects/{digest}"


def describe(description: Mapping[str, Any], *, stage_key: str, digest: str, files_digest: str) -> Artifact:
    """The artifact of a stage's description, with what the store knows of it.

    Raises:
        ValueError: the description is none, or gives what the store sets.
    """
    taken = _SET_BY_THE_STORE & set(description)
    if taken:
        raise ValueError(f"description gives {', '.join(sorted(taken))}, which the store sets; leave it out")
    by_store = {"uri": uri_of(digest), "digest": digest, "files_digest": files_digest, "stage_key": stage_key}
    return _ARTIFACT.validate_python({**description, **by_store})
