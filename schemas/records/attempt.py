"""One attempt at a step as plain data: what is asked of it, and how it ended. JSON on both sides."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from schemas.frozen import Frozen
from schemas.kinds import AnyWork
from schemas.recipe.inputs import Generation
from schemas.recipe.rewards import Reward
from schemas.records.artifacts import Artifact, Digest

RUN_STAGE = "tasks.stages.run_stage"
"""The function ``StageJob -> StageResult`` that computes every stage."""

Cause = Literal["refused", "diverged", "preempted", "memory", "storage", "killed", "hung", "internal"]


class Failure(Frozen):
    """Why an attempt has no result."""

    exit_code: int
    """One of ``flows.exit_codes``."""
    cause: Cause
    message: str
    remedy: str


class Share(Frozen):
    """What one attempt may use of its machine while it computes."""

    cpus: int
    gpus: tuple[str, ...] = ()
    """Names as CUDA_VISIBLE_DEVICES takes them: numbers or UUIDs."""


class AttemptRequest(Frozen):
    """One attempt at a step: everything that ``run_attempt`` has to know, on whatever machine it runs."""

    run_id: str
    step: str
    """The stage's name in the recipe, or ``model`` / ``data.NAME`` / ``verifiers.NAME`` of an implicit step."""
    stage_key: Digest
    key_parts: dict[str, Any]
    """What the stage key is the sha256 of."""
    work: AnyWork
    generation: Generation
    chat: bool | None = None
    seed: int
    rewards: dict[str, Reward] = Field(default_factory=dict)
    max_dropped: dict[str, float] = Field(default_factory=dict)
    inputs: dict[str, Artifact] = Field(default_factory=dict)
    """Role → artifact that the step reads."""
    storage: str
    """Where artifacts lie, as ``storage.storage.open_storage`` takes it."""
    share: Share | None = None
    """None: all of the machine."""
    only_reuse: bool = False
    """Compute nothing: an artifact that is not in the storage ends the attempt as ``absent``."""
    microbatch_size: int | None = None
    """In place of the work's own, after memory ran out; None: as the work says."""
    hang_seconds: float | None = None
    """Without a progress report, after which the computation is killed; None: never."""
    made_with: dict[str, str] = Field(default_factory=dict)
    """Provenance of the newest attempt before, to say what has changed where this one goes on from its checkpoint."""
    log: Path
    """Receives everything that the computation prints, appended."""
    function: str = RUN_STAGE
    """Dotted name of the function ``StageJob -> StageResult`` that computes."""


class AttemptBegun(Frozen):
    """A computation begins."""

    attempt: int
    """Its number among all attempts at the stage key, from 1."""
    provenance: dict[str, str]
    scratch: Path
    """Where its progress and its metric journal grow."""


class AttemptOutcome(Frozen):
    """How an attempt ended."""

    status: Literal["made", "reused", "absent", "stopped", "failed"]
    """``absent``: nothing was to be computed and the storage has no intact artifact. ``stopped``: a stop was requested
    before anything began."""
    attempt: int | None = None
    """Of a computation: its number. Of a reused artifact: the number of the attempt that made it."""
    artifact: Artifact | None = None
    provenance: dict[str, str] = Field(default_factory=dict)
    """What the artifact was made with, or the failed computation was."""
    made_by: str | None = None
    """The run that made the artifact."""
    unreported: bool = False
    """The artifact was made by an earlier attempt of this run whose journal still lies in scratch: that run was killed
    before the ledger had everything."""
    samples: tuple[dict[str, Any], ...] = ()
    """A few texts to show a person; of a reused artifact only where they still lie in scratch."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Of a dataset: why rows were dropped → how many."""
    committed_step: int = 0
    """Of a failed computation: the step of the checkpoint that another attempt goes on from; 0: it begins anew."""
    failure: Failure | None = None
    seconds: float = 0.0
    """Wall time."""
