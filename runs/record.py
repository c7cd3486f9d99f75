"""The content of ``run.json``: the record of a run and its stages."""

from typing import Any, Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import is_default, is_off, is_unset
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.approvals import Approval, Question, answer_to
from vantage.schemas.records.extensions import Shorter, in_words
from vantage.schemas.records.firings import Firing
from vantage.schemas.records.loosened_gates import LoosenedGate
from vantage.schemas.records.verdicts import Verdict

StageStatus = Literal[
    "waiting", "running", "reused", "completed", "gate_closed", "waiting_approval", "blocked", "failed", "resumable",
]  # fmt: skip
"""``waiting``: for the stage's inputs. ``waiting_approval``: the artifact exists, and a person has to approve it."""
RunStatus = Literal[
    "running", "completed", "gate_closed", "waiting_approval", "failed", "resumable", "removed"
]

REMOVED: RunStatus = "removed"
"""Status of a run of which ``vantage gc`` has left only the record and what it published."""

SUCCEEDED: frozenset[str] = frozenset({"reused", "completed"})
"""Status of a stage after which dependent stages can start."""

UNFINISHED: frozenset[str] = frozenset({"running", "failed", "resumable", "waiting_approval"})
"""Status of a run that the same command resumes."""


class StageRecord(Frozen):
    """The record of one stage in a run."""

    status: StageStatus = "waiting"
    attempt: int | None = None
    stage_key: str | None = None
    digest: str | None = None
    metrics: dict[str, float | None] = Field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict, exclude_if=is_unset)
    """Metric → its interval at 95 %, for the metrics that are printed in one line; empty in a record of an earlier version."""
    remark: str | None = None
    """A remark on the artifact: nothing was learned, or a model was compared with itself."""
    left_out: str | None = None
    """Data that the stage dropped or truncated, by reason."""
    warnings: tuple[str, ...] = ()
    """Warnings about the stage's course, and about its headline metrics."""
    firings: tuple[Firing, ...] = Field((), exclude_if=is_default(()))
    """The firings of the stage's guards, of a failed stage too."""
    verdicts: tuple[Verdict, ...] = ()
    shorter: tuple[Shorter, ...] = Field((), exclude_if=is_default(()))
    """The shorter stages that this one went on from, in order: of earlier runs, or of this run before a gate extended
    it."""
    loosened: tuple[LoosenedGate, ...] = Field((), exclude_if=lambda loosened: not loosened)
    """Gates that closed on this artifact in an earlier run, and that this run has made less strict."""
    seconds: float = 0.0
    """Wall time of the last attempt."""
    reason: str | None = None
    """Reason why the stage was blocked, failed or has to be resumed."""
    exit_code: int | None = None
    """Exit code of a stage that failed or has to be resumed: one of ``vantage.attempts.exit_codes``."""
    key_parts: dict[str, Any] = Field(default_factory=dict)
    """The parts of the stage key, so that a later plan can show changes."""
    provenance: dict[str, str] = Field(default_factory=dict)
    """Provenance of the artifact or of the newest attempt."""
    samples: tuple[dict[str, Any], ...] = ()
    """A few before/after texts of an evaluation."""
    microbatch_tokens: int | None = None
    """The reduced bound after memory ran out; None: the recipe's."""
    microbatch_size: int | None = Field(None, exclude_if=is_unset)
    """The reduced size that a version before ``microbatch_tokens`` recorded after memory ran out; None: the recipe's."""

    @property
    def extensions(self) -> list[str]:
        """Return how the stage was trained further, a line for each shorter stage that it went on from."""
        return in_words(self.shorter, self.key_parts) if self.key_parts else []


class TaskRunEnd(Frozen):
    """How a task run ended, as its own process knows it."""

    name: str
    status: str
    """A key of ``vantage.flows.prefect_server.flow_runs.STATES``."""
    message: str = ""


class OpenFlowRun(Frozen):
    """A flow run whose end may not be recorded in Prefect, because its process or the server died."""

    flow_run_id: str
    server: str
    """Name of its server: ``vantage.flows.prefect_server.server.server_name``."""
    status: str | None = None
    """Its final status, a key of ``vantage.flows.prefect_server.flow_runs.STATES``; None: running, or its process died."""
    message: str = ""
    task_runs: dict[str, TaskRunEnd] = Field(default_factory=dict, exclude_if=is_unset)
    """Id of a task run → how it ended, recorded with the status: Prefect knows the name of a task run only after its second event."""
    attempt: str | None = Field(None, exclude_if=is_unset)
    """``<stage key>/<number>`` of an attempt on a pool, whose messages in the storage contain its outcome; None: the flow
    run of a run."""


class PublishedCopy(Frozen):
    """MLflow's copy of an artifact."""

    location: str
    digest: str
    version: str | None = Field(None, exclude_if=is_unset)
    """Number of the registered model's version; None: an earlier version recorded the copy."""


class RunRecord(Frozen):
    """The content of ``run.json``."""

    run_id: str
    number: int
    recipe_digest: str
    """Digest of the resolved recipe before models were pinned, by which the same command finds its unfinished run."""
    recipe: ResolvedRecipe
    """The resolved recipe: defaults filled in, overrides applied, and registered models pinned to a version."""
    source: str
    """The recipe as given on the command line."""
    overrides: tuple[str, ...] = ()
    """The values of ``--set``."""
    part: str | None = Field(None, exclude_if=is_unset)
    """The part of the recipe that was asked for, ``until STAGE`` or ``only STAGE``; None: the whole recipe."""
    status: RunStatus = "running"
    stages: dict[str, StageRecord] = Field(default_factory=dict)
    used_keys: dict[str, str] = Field(default_factory=dict)
    """Step → stage key, written before the key is looked up, so that nothing removes what is found there."""
    mlflow_run_id: str | None = None
    prefect_flow_run_ids: tuple[str, ...] = ()
    lacks_flow_run: bool = Field(False, exclude_if=is_off)
    """True if the run reused everything and has no flow run in Prefect yet, because there was no server."""
    open_flow_runs: tuple[OpenFlowRun, ...] = ()
    copies: dict[str, PublishedCopy] = Field(default_factory=dict)
    """Registered model → MLflow's copy of the model that the run published."""
    unpublished: dict[str, str] = Field(default_factory=dict)
    """Registered model → reason why it was not published."""
    unsigned: dict[str, str] = Field(default_factory=dict)
    """Step → reason why its artifact was not signed, though the recipe asks for it."""
    refused_aliases: dict[str, str] = Field(default_factory=dict)
    """``NAME@ALIAS`` → reason why the alias was not moved to the published model, from a check of the policy or from a
    person; the reason of a gate is its verdict."""
    questions: dict[str, Question] = Field(default_factory=dict, exclude_if=is_unset)
    """Subject → the last question to a person about it, answered or not."""
    approvals: tuple[Approval, ...] = Field((), exclude_if=lambda approvals: not approvals)
    """The answers of this run, in the order in which they were applied."""
    started: str
    """Local time, for display only."""

    @property
    def open_questions(self) -> dict[str, Question]:
        """Subject → question without an answer."""
        return {
            subject: question
            for subject, question in self.questions.items()
            if answer_to(question, self.approvals) is None
        }
