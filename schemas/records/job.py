"""Input and output of a stage process, both JSON."""

from datetime import date as date_type
from pathlib import Path
from typing import Annotated, Any, Generic

from pydantic import BeforeValidator, Field, SerializeAsAny, TypeAdapter
from typing_extensions import TypeVar

from vantage.schemas.frozen import Frozen
from vantage.schemas.kinds import AnyWork
from vantage.schemas.recipe.fields import is_default, is_unset
from vantage.schemas.recipe.inputs import DEFAULT_DATE, Generation
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.work import Work
from vantage.schemas.records.artifacts import Digest
from vantage.schemas.records.firings import EndedEarly, Firing
from vantage.schemas.records.model_files import ModelFiles
from vantage.schemas.records.uncertainty import Uncertainty

_WORK: TypeAdapter[Work] = TypeAdapter(AnyWork)


def _as_its_kind(work: Any) -> Work:
    """Parse work as the resolved class of its kind."""
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
    date: date_type = Field(DEFAULT_DATE, exclude_if=is_default(DEFAULT_DATE))
    """The recipe's ``model.date``."""
    rewards: dict[str, Reward] = Field(default_factory=dict)
    """Name in the recipe → reward, for the reward that the stage uses, if any."""
    inputs: dict[str, Path] = Field(default_factory=dict)
    """Role → folder of the input's files; ``ROLE.base`` is the base model of the adapters in ``ROLE``. Roles are names of
    fields (``init``, ``data``, ``prompts`` …); ``judge`` and ``positive_verifier`` if they name one of the recipe's
    verifiers; and ``reward.r.i`` for term i of reward r, if it is a model or one of the recipe's verifiers."""
    digests: dict[str, Digest] = Field(default_factory=dict)
    """Role → content digest of the input."""
    max_dropped: dict[str, float] = Field(default_factory=dict)
    """Role of a dataset of the recipe → largest share of unusable rows (``data.NAME.max_dropped``)."""
    source_sha256: str | None = None
    """sha256 of an implicit step's source, as in its stage key; None: built-in content, or unknown."""
    scratch: Path
    """Folder of in-stage checkpoints, metric journal and progress, shared by all attempts at the stage key."""
    output: Path
    """An empty folder that the stage fills with the artifact's files."""
    threads: int | None = None
    """CPU threads of torch; None: torch's default."""

    def model(self, role: str) -> ModelFiles:
        """Return the files of the model in ``role``."""
        return ModelFiles(self.inputs[role], self.inputs.get(f"{role}.base"))

    def base_digest(self, role: str) -> Digest | None:
        """Return content digest of the whole model in ``role``, or of its adapters' base model; None: unknown, in a job
        made by hand."""
        return self.digests.get(f"{role}.base") or self.digests.get(role)


class StageResult(Frozen):
    """The metrics of a stage; its files are in ``job.output``."""

    metrics: dict[str, float | None]
    """Headline metrics, which gates check. Deterministic: no times, no speeds."""
    uncertainty: dict[str, Uncertainty] = Field(default_factory=dict)
    """Metric → its uncertainty, for exactly the names in ``vantage.schemas.records.metrics.estimated_metric_names``."""
    tokenizer_digest: str | None = None
    base: Digest | None = None
    """Content digest of the base model, for a model that is only adapters."""
    same_as_base: bool = False
    """Whether the adapters change nothing, for a policy that is only adapters."""
    samples: tuple[dict[str, Any], ...] = ()
    """A few before/after texts to show."""
    firings: tuple[Firing, ...] = Field((), exclude_if=is_default(()))
    """The firings of its guards."""
    ended_early: EndedEarly | None = Field(None, exclude_if=is_unset)
    """Details of the end, if the stage ended before its last step."""
