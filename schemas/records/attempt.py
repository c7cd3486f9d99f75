"""One attempt at a step as plain data: the request and the outcome, both JSON."""

from datetime import date as date_type
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.kinds import AnyWork
from vantage.schemas.recipe.fields import is_default, is_unset
from vantage.schemas.recipe.inputs import DEFAULT_DATE, Generation
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.records.artifacts import Artifact, Digest
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.extensions import Shorter
from vantage.schemas.records.facts import Facts
from vantage.schemas.records.firings import Firing
from vantage.schemas.records.usage import Usage

RUN_STAGE = "vantage.tasks.stages.run_stage"
"""The function ``StageJob -> StageResult`` that computes every stage."""

Cause = Literal[
    "refused",
    "diverged",
    "guard",
    "time",
    "preempted",
    "memory",
    "storage",
    "killed",
    "cancelled",
    "hung",
    "engine",
    "internal",
]


class Failure(Frozen):
    """Reason why an attempt has no result."""

    exit_code: int
    """One of ``vantage.attempts.exit_codes``."""
    cause: Cause
    message: str
    remedy: str


class Share(Frozen):
    """The CPUs and GPUs of the machine that one attempt may use."""

    cpus: int
    gpus: tuple[str, ...] = ()
    """Names for CUDA_VISIBLE_DEVICES: numbers or UUIDs."""


class AttemptRequest(Frozen):
    """One attempt at a step: all inputs of ``run_attempt``, which may run on another machine."""

    run_id: str
    step: str
    """The stage's name in the recipe, or ``model`` / ``data.NAME`` / ``verifiers.NAME`` of an implicit step."""
    stage_key: Digest
    key_parts: dict[str, Any]
    """The value whose sha256 is the stage key."""
    work: AnyWork
    generation: Generation
    chat: bool | None = None
    date: date_type = Field(DEFAULT_DATE, exclude_if=is_default(DEFAULT_DATE))
    seed: int
    rewards: dict[str, Reward] = Field(default_factory=dict)
    max_dropped: dict[str, float] = Field(default_factory=dict)
    inputs: dict[str, Artifact] = Field(default_factory=dict)
    """Role → artifact that the step reads."""
    storage: str
    """Address of the storage, for ``vantage.storage.storage.open_storage``."""
    share: Share | None = None
    """CPUs and GPUs that the attempt uses; None: the share that ``resources`` asks for, of the machine that runs it."""
    only_reuse: bool = False
    """Compute nothing: if the artifact is not in the storage, the attempt ends as ``absent``."""
    microbatch_tokens: int | None = None
    """Limit that replaces the work's after memory ran out; None: the work's."""
    microbatch_size: int | None = Field(None, exclude_if=is_unset)
    """Number of rows that replaces the work's, in a run that an earlier version began; None: the work's."""
    resources: Resources = Resources()
    """Resources of the machine that the computation needs, and its time limit."""
    extends: Shorter | None = Field(None, exclude_if=is_unset)
    """The shorter stage from which the attempt goes on, whose artifact and training state are among the inputs; None:
    it starts anew."""
    made_with: dict[str, str] = Field(default_factory=dict)
    """Provenance of the previous attempt, to record what has changed if this one resumes from its checkpoint."""
    log: Path
    """File to which everything that the computation prints is appended."""
    function: str = RUN_STAGE
    """Dotted name of the function ``StageJob -> StageResult`` that computes."""


class AttemptBegun(Frozen):
    """The start of a computation."""

    attempt: int
    """Number of the attempt among all at the stage key, starting at 1."""
    provenance: dict[str, str]
    scratch: Path
    """Folder of its progress and its metric journal."""


class AttemptOutcome(Frozen):
    """Outcome of an attempt."""

    status: Literal["made", "reused", "absent", "stopped", "failed"]
    """``absent``: ``only_reuse``, and the storage has no intact artifact. ``stopped``: a stop was requested before the
    computation started."""
    attempt: int | None = None
    """Number of the computation, or of the attempt that made a reused artifact."""
    artifact: Artifact | None = None
    provenance: dict[str, str] = Field(default_factory=dict)
    """Provenance of the artifact, or of the failed computation."""
    made_by: str | None = None
    """The run that made the artifact."""
    unreported: bool = False
    """An earlier attempt of this run made the artifact, and its journal is still in scratch: the process was killed
    before everything was recorded in the ledger."""
    samples: tuple[dict[str, Any], ...] = ()
    """A few texts to show; for a reused artifact only if they are still in scratch."""
    firings: tuple[Firing, ...] = Field((), exclude_if=is_default(()))
    """The firings of the stage's guards, also of an attempt that failed."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Reason → number of rows that were dropped for it; for a dataset."""
    committed_step: int = 0
    """Step of the checkpoint from which the next attempt resumes, for a failed computation; 0: there is none."""
    failure: Failure | None = None
    seconds: float = 0.0
    """Wall time."""
    energy: Energy | None = Field(None, exclude_if=is_unset)
    """Energy of the computation; None: there was none, or the machine has no counter that can be read."""
    usage: Usage | None = Field(None, exclude_if=is_unset)
    """Readings of the machine during the computation; None: nothing was computed, or several machines computed it."""
    facts: Facts = Field(default_factory=dict, exclude_if=is_unset)
    """Facts of the machine when the computation began; empty: nothing was computed, or several machines computed it."""
