"""Operations of the ledger, one for each call, as they are stored in the outbox.

Every operation has the time at which it happened, so sending it late, or twice, records the same.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import is_unset
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.artifacts import Artifact, Digest
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.facts import Facts
from vantage.schemas.records.loosened_gates import LoosenedGate
from vantage.schemas.records.milliseconds import Milliseconds
from vantage.schemas.records.usage import Usage
from vantage.schemas.records.verdicts import Verdict

StageOutcome = Literal["completed", "gate_closed", "waiting_approval", "failed", "resumable"]
RunOutcome = Literal["completed", "gate_closed", "waiting_approval", "failed", "resumable"]

MetricRow = tuple[str, float, Milliseconds, int]
"""Name, value, time (milliseconds since 1970), step."""


class Input(Frozen):
    """An input of a stage: the artifact, and the step of this recipe that made it."""

    stage: str
    artifact: Artifact


class OpenRun(Frozen):
    """A run starts or resumes."""

    operation: Literal["open_run"] = "open_run"
    time: Milliseconds
    run_id: str
    experiment: str
    name: str
    recipe: dict[str, Any]
    origin: dict[str, str] = Field(default_factory=dict)
    """Tag → value: user and version of the code."""


class OpenStage(Frozen):
    """An attempt at a stage starts."""

    operation: Literal["open_stage"] = "open_stage"
    time: Milliseconds
    stage: str
    kind: str
    stage_key: str
    attempt: int
    params: dict[str, Any]
    inputs: dict[str, Input]
    source_sha256: str | None = None
    """Digest of the source (file, folder or package) that an implicit step reads."""


class LogMetrics(Frozen):
    """Rows of a stage's metric journal, up to a committed checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="constants")

    operation: Literal["log_metrics"] = "log_metrics"
    stage: str
    rows: tuple[MetricRow, ...]


class RecordVerdicts(Frozen):
    """The verdicts of a stage's gates."""

    operation: Literal["record_verdicts"] = "record_verdicts"
    time: Milliseconds
    stage: str
    verdicts: tuple[Verdict, ...]
    loosened: tuple[LoosenedGate, ...] = Field((), exclude_if=lambda loosened: not loosened)
    """Gates that closed on this artifact in an earlier run, and that this run has made less strict."""


class FinishStage(Frozen):
    """An attempt at a stage ends."""

    operation: Literal["finish_stage"] = "finish_stage"
    time: Milliseconds
    stage: str
    outcome: StageOutcome
    artifact: Artifact | None
    provenance: dict[str, str]
    reason: str | None
    folder: str | None = None
    """Folder of the artifact's files."""
    energy: Energy | None = Field(None, exclude_if=is_unset)
    """Energy of the attempt; None: not measured."""
    usage: Usage | None = Field(None, exclude_if=is_unset)
    """Readings of the machine during the attempt; None: not measured."""
    first_reading: int = Field(0, exclude_if=lambda first: not first)
    """Number of readings of earlier attempts at the stage; those of ``usage`` are numbered after them."""
    facts: Facts = Field(default_factory=dict, exclude_if=is_unset)
    """Facts of the machine when the attempt began."""


class RecordReuse(Frozen):
    """A stage did not run, because its artifact was in the store."""

    operation: Literal["record_reuse"] = "record_reuse"
    time: Milliseconds
    stage: str
    kind: str
    stage_key: str
    params: dict[str, Any]
    inputs: dict[str, Input]
    artifact: Artifact
    source_sha256: str | None = None
    folder: str | None = None


class FinishRun(Frozen):
    """A run ends; it may resume later."""

    operation: Literal["finish_run"] = "finish_run"
    time: Milliseconds
    outcome: RunOutcome
    conclusion: str | None = Field(None, exclude_if=is_unset)
    """The verdict on the run in one line; None: an earlier version recorded the end."""


class CloseRun(Frozen):
    """The process of another run is dead; its records that are still running are closed."""

    operation: Literal["close_run"] = "close_run"
    time: Milliseconds
    run_id: str
    reason: str


class AliasOperation(Frozen):
    """An operation that moves an alias, or may move one."""

    time: Milliseconds
    after: Milliseconds | None = Field(None, exclude_if=is_unset)
    """The order of an earlier movement of the alias whose clock was ahead of this one's; None: there is none."""

    @property
    def order(self) -> int:
        """Return the number by which movements of one alias are ordered; it is the time, unless a clock was wrong."""
        return self.time if self.after is None else max(self.time, self.after + 1)


class Publish(AliasOperation):
    """An artifact becomes a version of a registered model."""

    operation: Literal["publish"] = "publish"
    stage: str
    artifact: Artifact
    folder: str
    registered_model: str
    alias: str | None
    by: str | None = Field(None, exclude_if=is_unset)
    """Login name of the person who ran ``vantage publish``; None: the run itself published it at its end."""


class RecordApproval(Frozen):
    """A person's answer to a question of the run, about a gate that did not pass or about an alias."""

    operation: Literal["record_approval"] = "record_approval"
    approval: Approval


class MoveAlias(AliasOperation):
    """A person moves an alias to a version that was published before.

    Vantage moves aliases only by this operation and ``Publish``. Any other movement was made by other means.
    """

    operation: Literal["move_alias"] = "move_alias"
    stage: str
    """The stage of this run that made the version's artifact."""
    digest: Digest
    """Content digest of the version that the alias moves to."""
    registered_model: str
    alias: str
    from_version: str
    """Version that the alias pointed to; empty: the alias did not exist."""
    to_version: str
    by: str
    """Name that the person gave."""
    login: str
    """Login name of the process."""
    reason: str


class LogReport(Frozen):
    """The report of the run is made."""

    operation: Literal["log_report"] = "log_report"
    time: Milliseconds
    file: str
    """One HTML file; a new report replaces the earlier one."""


class LogBill(Frozen):
    """The bill of materials of a stage's artifact is made."""

    operation: Literal["log_bill"] = "log_bill"
    time: Milliseconds
    stage: str
    file: str
    """CycloneDX in JSON; a new bill replaces the earlier one."""


Operation = (
    OpenRun
    | OpenStage
    | LogMetrics
    | RecordVerdicts
    | FinishStage
    | RecordReuse
    | FinishRun
    | CloseRun
    | Publish
    | LogReport
    | LogBill
    | RecordApproval
    | MoveAlias
)
_OPERATION: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Field(discriminator="operation")])


def to_json(operation: Operation) -> dict[str, Any]:
    """Return the operation as stored in the outbox."""
    return operation.model_dump(mode="json")


def from_json(value: Mapping[str, Any]) -> Operation:
    """Parse an operation from the outbox; pydantic's ValidationError if it is invalid."""
    return _OPERATION.validate_python(value, strict=False)
