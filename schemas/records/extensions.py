"""Stages that were trained further: the shorter stage that one goes on from, and the key of its training state."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.extending import Unit, length_in_words, length_of, unit_of
from vantage.schemas.recipe.fields import is_default, is_unset
from vantage.schemas.recipe.work import Work
from vantage.schemas.records.stage_key import stage_key as hash_key_parts
from vantage.schemas.records.verdicts import Verdict

STATE_KIND = "training_state"


class Shorter(Frozen):
    """A stage as a run made it, before it was trained further."""

    run_id: str
    """The run that made it."""
    step: str
    """The stage's name in that run."""
    stage_key: str
    digest: str
    length: float
    """The stage's iterations, or epochs."""
    provenance: dict[str, str] = Field(default_factory=dict, exclude_if=is_unset)
    """Identity of the computation."""
    verdicts: tuple[Verdict, ...] = Field((), exclude_if=is_default(()))
    """The verdicts of its gates, if a gate had the stage trained further."""

    def extended_to(self, work: Work) -> str:
        """Return in words how far a longer stage goes on from it."""
        return extension(self, length_of(work), unit_of(work))


def in_words(shorter: Sequence[Shorter], key_parts: Mapping[str, Any]) -> list[str]:
    """Return how a stage with these key parts was trained further, a line for each shorter stage that it goes on from."""
    if not shorter:
        return []
    configuration = key_parts["configuration"]
    unit: Unit = "iterations" if "iterations" in configuration else "epochs"
    lengths = [*(each.length for each in shorter[1:]), float(configuration[unit])]
    return [
        "; ".join([extension(each, length, unit), *(f"gate {verdict}" for verdict in each.verdicts)])
        for each, length in zip(shorter, lengths, strict=True)
    ]


def extension(shorter: Shorter, length: float, unit: Unit) -> str:
    """Return in words how far a longer stage goes on from a shorter one."""
    return f"extends {shorter.run_id}/{shorter.step}: {shorter.length:g} → {length_in_words(length, unit)}"


def state_key_parts(stage_key: str) -> dict[str, Any]:
    """Return the parts of the key of a stage's training state."""
    return {"kind": STATE_KIND, "revision": 1, "of": stage_key}


def state_key(stage_key: str) -> str:
    """Return the key under which a stage's training state is stored."""
    return hash_key_parts(state_key_parts(stage_key))
