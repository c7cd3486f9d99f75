"""Rules of extending a stage: its length, and reasons to refuse a longer one."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Positive
from vantage.schemas.recipe.work import Work

if TYPE_CHECKING:
    from vantage.schemas.recipe.stage import Training

PREVIOUS = "previous"
"""Role of the artifact of the shorter stage that a stage goes on from."""
PREVIOUS_STATE = "previous.state"
"""Role of the training state that the shorter stage has left."""
PREVIOUS_ROLES = (PREVIOUS, PREVIOUS_STATE)

Unit = Literal["iterations", "epochs"]
AnyWork = TypeVar("AnyWork", bound=Work)


class Extend(Frozen):
    """Bounds of how far a closed gate trains its stage further."""

    by: Positive
    """Iterations (``epochs`` where the stage has no iterations) of each extension."""
    at_most: Annotated[int, Field(ge=1, le=100, strict=True)] = 1
    """Extensions; if the gate is closed after the last one, it stops the run."""


def unit_of(work: Work) -> Unit:
    """Return the field that holds the length of a stage that trains."""
    return "iterations" if "iterations" in type(work).model_fields else "epochs"


def length_of(work: Work) -> float:
    """Return how long a stage trains, in the unit of ``unit_of``."""
    return float(getattr(work, unit_of(work)))


def length_in_words(length: float, unit: Unit) -> str:
    """Return a length with its unit: ``60 iterations``, ``1 epoch``."""
    return f"{length:g} {unit.removesuffix('s') if length == 1 else unit}"


def with_length(work: AnyWork, length: float) -> AnyWork:
    """Return a copy of the work with another length."""
    unit = unit_of(work)
    return work.model_copy(update={unit: int(length) if unit == "iterations" else length})


def why_not_extended(work: "Training") -> str | None:
    """Return why a longer stage would not go on from where this one ends, with the remedy; None: it would."""
    if work.schedule != "constant":
        return (
            f"schedule={work.schedule} has reached its end, 0, by the stage's last step, and a longer stage would have had "
            "other learning rates; use schedule: constant"
        )
    if work.resources.cuts_weights:
        return "the training state is kept whole, and resources.distributed.strategy=fsdp2 cuts it; use strategy: ddp"
    return _why_not_measured(work, length_of(work), unit_of(work))


def why_not_extended_by(work: "Training", extend: Extend) -> str | None:
    """Return why a stage cannot be extended by so much, with the remedy; None: it can."""
    if unit_of(work) == "epochs":
        return None
    if extend.by != int(extend.by):
        return f"extend.by={extend.by:g} is a number of iterations; use a whole number"
    return _why_not_measured(work, length_of(work) + extend.by, "iterations + extend.by")


def _why_not_measured(work: "Training", length: float, field: str) -> str | None:
    """Return why a longer stage would not measure the weights after ``length``, as a stage of that length does; None:
    it would."""
    every = measured_every(work)
    if not every or any(length % each == 0 for each in every):
        return None
    best = every[0]
    near = max(int(length // best) * best, best)
    return (
        f"{field}={length:g} is not a multiple of validate_every={best}, so that the last measurement is one that a longer stage "
        f"does not make; use {near} or {near + best}"
    )


def measured_every(work: Any) -> tuple[int, ...]:
    """Return the intervals, in iterations, at which a stage measures its weights; empty: it keeps the last weights."""
    if (validations := getattr(work, "validations", None)) is not None:
        return tuple(validations)
    every = getattr(work, "validate_every", None)
    return () if every is None else (every,)
