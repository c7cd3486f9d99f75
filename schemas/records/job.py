"""What a stage is handed, and what it hands back: JSON on both sides of a process boundary."""

from pathlib import Path
from typing import Annotated, Any, Generic

from pydantic import BeforeValidator, Field, SerializeAsAny, TypeAdapter
from typing_extensions import TypeVar

from schemas.frozen import Frozen
from schemas.kinds import AnyWork
from schemas.recipe.inputs import Generation
from schemas.recipe.rewards import Reward
from schemas.recipe.work import Work
from schemas.records.uncertainty import Uncertainty

_WORK: TypeAdapter[Work] = TypeAdapter(AnyWork)


def _as_its_kind(work: Any) -> Work:
    """What is read from JSON becomes the class of its kind, with nothing left open."""
    return _WORK.validate_python(work)


W = TypeVar("W", bound=Work, default=Work, covariant=True)


class StageJob(Frozen, Generic[W]):
    """One attempt at one stage, whose work is a ``W``."""

    run_id: str
    name: str
    """The stage's name in the recipe, or ``model`` / ``data.NAME`` / ``verifiers.NAME`` for an implicit step."""
    attempt: int
    stage_key: str
    seed: int
    work: Annotated[SerializeAsAny[W], BeforeValidator(_as_its_kind)]
    generation: Generation
    chat: bool | None = None
    """The recipe's ``model.chat``."""
    rewards: dict[str, Reward] = Field(default_factory=dict)
    """The reward (by the recipe's name) that the stage reads, if it reads one."""
    inputs: dict[str, Path] = Field(default_factory=dict)
    """Role → folder of the input's files. Roles are the fields' names (``init``, ``data``, ``prompts`` …), among them
    ``judge`` and ``positive_verifier`` where one of the recipe's verifiers is named there; term i of reward r that is a
    model or one of those has the role ``reward.r.i``."""
    max_dropped: dict[str, float] = Field(default_factory=dict)
    """Role of a dataset of the recipe → the share of its rows that may be unusable: ``data.NAME.max_dropped``."""
    source_sha256: str | None = None
    """Of an implicit step: the digest in its key of what it reads from outside; None: of built-in content, or unknown."""
    scratch: Path
    """Outlives the attempt: in-stage checkpoints, metric journal, progress. One folder for one stage key."""
    output: Path
    """An empty folder that the stage fills with the artifact's files."""
    threads: int | None = None
    """CPU threads of torch; None: as many as it finds."""


class StageResult(Frozen):
    """What a stage measured; its files lie in ``job.output``."""

    metrics: dict[str, float | None]
    """Headline metrics, from which gates are judged. Deterministic: no times, no speeds."""
    uncertainty: dict[str, Uncertainty] = Field(default_factory=dict)
    """Metric → how sure it is: exactly those of ``schemas.records.uncertainty.estimated_metric_names``."""
    tokenizer_digest: str | None = None
    samples: tuple[dict[str, Any], ...] = ()
    """A few before/after texts to show a person."""
