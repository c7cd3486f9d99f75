"""The state of a run after its operations: the run, its stages, and the last recorded step of each metric."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from vantage.ledger.operations import (
    FinishRun,
    FinishStage,
    Input,
    LogBill,
    LogMetrics,
    LogReport,
    MetricRow,
    OpenRun,
    OpenStage,
    Operation,
    Publish,
    RecordApproval,
    RecordReuse,
    RecordVerdicts,
)
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.loosened_gates import LoosenedGate
from vantage.schemas.records.verdicts import Verdict


@dataclass(frozen=True)
class StageEntry:
    """The state of one stage of the run."""

    name: str
    kind: str
    stage_key: str
    inputs: dict[str, Input]
    attempt: int | None = None
    outcome: str = "running"
    reason: str | None = None
    artifact: Artifact | None = None
    source_sha256: str | None = None
    source: str | None = None
    """Source of a dataset or an imported model, as the recipe names it."""
    folder: str | None = None
    """Folder of the artifact's files."""
    made: int | None = None
    """Time when the artifact was first recorded (milliseconds since 1970); recording it again does not change this."""
    verdicts: tuple[Verdict, ...] = ()
    readings: int = 0
    """Number of readings of the machine during all attempts at the stage so far."""
    loosened: tuple[LoosenedGate, ...] = ()
    """Gates that closed on the artifact in an earlier run, and that this run has made less strict."""


@dataclass(frozen=True)
class RunEntry:
    """The state of a run."""

    run_id: str
    experiment: str
    name: str
    origin: dict[str, str] = field(default_factory=dict)
    """User and version of the code when the run was last opened."""
    openings: int = 1
    """Number of times that the run was started or resumed."""
    outcome: str = "running"
    stages: dict[str, StageEntry] = field(default_factory=dict)
    approvals: tuple[Approval, ...] = ()
    """Answers of people to questions of the run."""
    last_steps: dict[tuple[str, str], int] = field(default_factory=dict)
    """(Stage, metric) → the last recorded step."""
    report: str | None = None
    """Name of the run's report among its artifacts in MLflow."""
    bills: frozenset[str] = frozenset()
    """Stages whose runs have a bill of materials among their artifacts in MLflow."""
    generation: dict[str, Any] = field(default_factory=dict)
    """The recipe's settings of sampled text."""
    licenses: dict[str, str] = field(default_factory=dict)
    """Step → licence of its artifact, if the recipe names one."""
    published: dict[str, str | None] = field(default_factory=dict)
    """Registered model → its alias, for the models that the run publishes."""
    conclusion: str | None = None
    """The verdict at the run's last end; None: it has not ended, or an earlier version recorded its end."""


def apply_operation(entry: RunEntry | None, operation: Operation) -> RunEntry:
    """Return the run's entry after one more operation; ValueError if the operation is not valid in this state."""
    if isinstance(operation, OpenRun):
        if entry is None:
            return RunEntry(
                run_id=operation.run_id,
                experiment=operation.experiment,
                name=operation.name,
                origin=operation.origin,
                generation=operation.recipe.get("generation", {}),
                licenses=operation.recipe.get("licenses", {}),
            )
        return replace(entry, outcome="running", openings=entry.openings + 1, origin=operation.origin)
    if entry is None:
        raise ValueError(f"{operation.operation} before open_run; a run's first operation is open_run")
    match operation:
        case OpenStage():
            stage = _opened(entry.stages.get(operation.stage), operation)
        case RecordReuse():
            stage = _reused(entry.stages.get(operation.stage), operation)
        case RecordVerdicts():
            known = _stage(entry, operation.stage)
            stage = replace(known, verdicts=operation.verdicts, loosened=operation.loosened)
        case FinishStage():
            known = _stage(entry, operation.stage)
            stage = replace(
                known,
                outcome=operation.outcome,
                reason=operation.reason,
                readings=known.readings + (len(operation.usage.times) if operation.usage else 0),
                folder=operation.folder or known.folder,
                artifact=operation.artifact or known.artifact,
                made=_first_recorded(known, operation.artifact, operation.time)
                if operation.artifact
                else known.made,
            )
        case LogMetrics():
            last = {(operation.stage, name): step for name, _, _, step in operation.rows}
            return replace(entry, last_steps={**entry.last_steps, **last})
        case LogReport():
            return replace(entry, report=Path(operation.file).name)
        case LogBill():
            return replace(entry, bills=entry.bills | {operation.stage})
        case RecordApproval():
            return _answered(entry, operation.approval)
        case Publish():
            named = {operation.registered_model: operation.alias}
            return replace(entry, published=entry.published | named)
        case FinishRun():
            return replace(entry, outcome=operation.outcome, conclusion=operation.conclusion)
        case _:
            return entry
    return replace(entry, stages={**entry.stages, stage.name: stage})


def _opened(known: StageEntry | None, operation: OpenStage) -> StageEntry:
    return StageEntry(
        name=operation.stage,
        kind=operation.kind,
        stage_key=operation.stage_key,
        inputs=operation.inputs,
        source_sha256=operation.source_sha256,
        source=_source_in(operation.params),
        attempt=operation.attempt,
        artifact=known.artifact if known else None,
        made=known.made if known else None,
        verdicts=known.verdicts if known else (),
        loosened=known.loosened if known else (),
        readings=known.readings if known else 0,
    )


def _reused(known: StageEntry | None, operation: RecordReuse) -> StageEntry:
    """Return the stage's entry; if this run itself made the artifact, it stays completed, or waits at its gate."""
    made_here = known is not None and known.attempt is not None and known.outcome != "reused"
    held = known.outcome if _has_artifact(known, operation.artifact) else ""
    waits = held in ("gate_closed", "waiting_approval")
    return StageEntry(
        name=operation.stage,
        kind=operation.kind,
        stage_key=operation.stage_key,
        inputs=operation.inputs,
        source_sha256=operation.source_sha256,
        source=_source_in(operation.params),
        folder=operation.folder,
        attempt=known.attempt if known else None,
        outcome=held if waits else "completed" if made_here else "reused",
        artifact=operation.artifact,
        made=_first_recorded(known, operation.artifact, operation.time),
        verdicts=known.verdicts if known else (),
        loosened=known.loosened if known else (),
        readings=known.readings if known else 0,
    )


def _source_in(params: Mapping[str, Any]) -> str | None:
    """Return the source of the dataset or model that a step reads."""
    read = params.get("data", params.get("model"))
    return read.get("source") if isinstance(read, Mapping) else None


def _answered(entry: RunEntry, answer: Approval) -> RunEntry:
    """Return the entry after a person's answer, which decides on the outcome of the stage that waited for it."""
    entry = replace(entry, approvals=(*entry.approvals, answer))
    stage = entry.stages.get(answer.question.subject)
    if stage is None or stage.outcome != "waiting_approval":
        return entry
    done = "reused" if stage.attempt is None else "completed"
    stage = replace(stage, outcome=done if answer.approved else "gate_closed")
    return replace(entry, stages={**entry.stages, stage.name: stage})


def _stage(entry: RunEntry, name: str) -> StageEntry:
    if name not in entry.stages:
        raise ValueError(f"stage {name!r} was never opened in run {entry.run_id}; open or reuse it first")
    return entry.stages[name]


def _has_artifact(known: StageEntry | None, artifact: Artifact) -> TypeGuard[StageEntry]:
    """Return whether the stage's recorded artifact is this one."""
    return known is not None and known.artifact is not None and known.artifact.digest == artifact.digest


def _first_recorded(known: StageEntry | None, artifact: Artifact, time: int) -> int:
    """Return the time when the artifact was first recorded; ``time`` if it is new."""
    return known.made if _has_artifact(known, artifact) and known.made is not None else time


def new_rows(entry: RunEntry, stage: str, rows: list[MetricRow]) -> list[MetricRow]:
    """Return rows after the last recorded step of their metric.

    A journal is written in the order of its steps, one value a metric and step. So values that a retried or rolled-back
    attempt measures again are dropped, and a curve never has two points at one step.
    """
    last = {name: step for (of, name), step in entry.last_steps.items() if of == stage}
    fresh = []
    for row in rows:
        name, _, _, step = row
        if step > last.get(name, -1):
            last[name] = step
            fresh.append(row)
    return fresh
