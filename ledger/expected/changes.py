"""The changes that one operation of a run makes in MLflow.

A change contains no MLflow id: only the server knows who made an input, and whether MLflow has an artifact already.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vantage.ledger.conclusions import headlines
from vantage.ledger.entries import RunEntry
from vantage.ledger.expected.answer_tags import alias_tags, answer_tags
from vantage.ledger.expected.artifact_fields import (
    ExpectedDataset,
    ExpectedModel,
    datasets_read,
    expected_model,
    measured_dataset,
)
from vantage.ledger.expected.energy_tags import energy_tags
from vantage.ledger.expected.system_metrics import system_rows
from vantage.ledger.expected.texts import fit_param, fit_tag, flatten
from vantage.ledger.notes import BILL, model_tags
from vantage.ledger.operations import (
    CloseRun,
    FinishRun,
    FinishStage,
    Input,
    LogBill,
    LogMetrics,
    LogReport,
    MetricRow,
    MoveAlias,
    OpenRun,
    OpenStage,
    Operation,
    Publish,
    RecordApproval,
    RecordReuse,
    RecordVerdicts,
)
from vantage.ledger.remarks import remark_on
from vantage.schemas.kind import MODELS
from vantage.schemas.kinds import KINDS
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.facts import fact_tags
from vantage.schemas.records.firings import in_words
from vantage.schemas.records.metric_warnings import warnings_of

RUNNING = "RUNNING"
"""MLflow's status of a run that has not ended."""

CONCLUSION = "vantage.conclusion"
"""Tag of the parent run: the verdict on the run in one line."""
_RUN_STATUS = {
    "completed": "FINISHED",
    "gate_closed": "FAILED",
    "waiting_approval": "SCHEDULED",
    "failed": "FAILED",
    "resumable": "KILLED",
}
_STAGE_STATUS = {
    **_RUN_STATUS,
    "gate_closed": "FINISHED",
    "waiting_approval": "FINISHED",
    "reused": "FINISHED",
}


@dataclass(frozen=True)
class ShownArtifact:
    """The tags, rows and pages by which a stage's run shows the stage's artifact."""

    artifact: Artifact
    tags: Mapping[str, str]
    rows: tuple[MetricRow, ...]
    """The headline metrics."""
    model: ExpectedModel | None
    """The artifact on MLflow's page of models; None: it is not a model."""
    candidate: Input | None
    """The model that an evaluation has measured; its page shows the rows too."""
    dataset: tuple[str, str] | None
    """(Name, digest) in MLflow of the dataset on which the rows were measured."""
    is_reused: bool
    """Whether the run found the artifact in the store. If MLflow knows the run that made it, that run shows it."""


@dataclass(frozen=True)
class RunChange:
    """Additions to one of MLflow's runs, which is created if it is missing."""

    stage: str | None
    """The stage that the run belongs to; None: the parent run."""
    time: int
    """Start of the run if it is created, in milliseconds since 1970."""
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[MetricRow, ...] = ()
    inputs: Mapping[str, Input] | None = None
    """Role → what the stage reads; None: unchanged."""
    datasets: tuple[ExpectedDataset, ...] = ()
    """Datasets among the inputs, and the source file of a prepared one."""
    shown: ShownArtifact | None = None
    has_page: bool = False
    """Whether the text of its page may have changed."""
    status: str | None = None
    """MLflow's new status; None: unchanged."""
    ended: int | None = None
    """End of the run, if the status is one of a run that has ended."""


@dataclass(frozen=True)
class Closing:
    """The process of a run is dead: its runs of MLflow that are still running are closed."""

    run_id: str
    reason: str
    time: int
    is_own: bool
    """Whether this is the run of this outbox; its parent run goes on."""


@dataclass(frozen=True)
class VersionChange:
    """An artifact is a version of a registered model, and its alias points to it."""

    operation: Publish
    facts: Mapping[str, str]
    """Gates and measurements, as tags of the version."""


@dataclass(frozen=True)
class AliasChange:
    """An alias points to a version that was published before."""

    operation: MoveAlias


@dataclass(frozen=True)
class FileChange:
    """A file is among the artifacts of one of MLflow's runs, unless it was removed before it was sent."""

    stage: str | None
    time: int
    path: str
    name: str
    """The file's name in MLflow."""
    described: str
    has_page: bool
    """Whether the stage's page names it."""


@dataclass(frozen=True)
class PagesChange:
    """The pages of all stages and models list the stages that have read them since."""


@dataclass(frozen=True)
class ListChange:
    """The list of the recipe's runs shows these metrics of the parent run."""

    metrics: tuple[str, ...]


Change = RunChange | Closing | VersionChange | AliasChange | FileChange | ListChange | PagesChange


def changes(entry: RunEntry, operation: Operation) -> Iterator[Change]:
    """Yield what one operation changes in MLflow, in the order in which it is sent.

    Args:
        entry: the run's state after the operation.
    """
    match operation:
        case OpenRun():
            yield from _opened_run(entry, operation)
        case OpenStage():
            tags = {"vantage.status": "running", "vantage.attempt": str(operation.attempt)}
            tags = _lineage_tags(entry, operation.stage) | entry.origin | tags
            yield _reading(entry, operation, tags, status=RUNNING)
        case LogMetrics():
            started = min(time for _, _, time, _ in operation.rows)
            yield RunChange(operation.stage, started, rows=operation.rows)
        case RecordVerdicts():
            tags = _verdict_tags(operation) | _remark_tags(entry, operation.stage)
            yield RunChange(operation.stage, operation.time, tags, has_page=True)
        case FinishStage():
            yield from _finished_stage(entry, operation)
        case RecordReuse():
            yield from _reused_stage(entry, operation)
        case FinishRun():
            tags, status = {"vantage.status": operation.outcome}, _RUN_STATUS[operation.outcome]
            if operation.conclusion is not None:
                tags[CONCLUSION] = fit_tag(operation.conclusion)
            yield RunChange(None, operation.time, tags, has_page=True, status=status, ended=operation.time)
            yield ListChange(headlines(entry))
            yield PagesChange()
        case CloseRun():
            yield Closing(operation.run_id, operation.reason, operation.time, is_own=False)
        case Publish():
            yield VersionChange(operation, model_tags(entry, operation.stage))
        case LogReport():
            name = Path(operation.file).name
            yield FileChange(None, operation.time, operation.file, name, "report of this run", has_page=False)
        case LogBill():
            has_page = operation.stage in entry.stages
            yield FileChange(
                operation.stage, operation.time, operation.file, BILL, "bill of materials", has_page
            )
        case RecordApproval():
            yield _answered(entry, operation.approval)
        case MoveAlias():
            yield AliasChange(operation)
            yield RunChange(operation.stage, operation.time, _fitting(alias_tags(operation)))


def _opened_run(entry: RunEntry, operation: OpenRun) -> Iterator[Change]:
    is_again = entry.openings > 1
    if is_again:
        reason = "its process died; the run was taken over"
        yield Closing(operation.run_id, reason, operation.time, is_own=True)
    under_way = {CONCLUSION: "under way"} if entry.conclusion is not None else {}
    yield RunChange(
        None,
        operation.time,
        {"vantage.status": "running", **under_way, **operation.origin},
        _params(operation.recipe),
        status=RUNNING if is_again else None,
    )


def _reading(
    entry: RunEntry,
    operation: OpenStage | RecordReuse,
    tags: Mapping[str, str],
    *,
    shown: ShownArtifact | None = None,
    status: str | None = None,
) -> RunChange:
    stage = entry.stages[operation.stage]
    return RunChange(
        operation.stage,
        operation.time,
        {**tags, **_remark_tags(entry, operation.stage)},
        _params(operation.params),
        inputs=stage.inputs,
        datasets=tuple(datasets_read(entry, stage)),
        shown=shown,
        has_page=True,
        status=status,
    )


def _finished_stage(entry: RunEntry, operation: FinishStage) -> Iterator[Change]:
    name, artifact, time = operation.stage, operation.artifact, operation.time
    tags = {"vantage.status": operation.outcome, **energy_tags(operation.energy)} | fact_tags(operation.facts)
    tags |= {f"vantage.provenance.{part}": value for part, value in operation.provenance.items()}
    yield RunChange(
        name,
        time,
        _fitting(tags) | _remark_tags(entry, name),
        rows=tuple(system_rows(operation.usage, first=operation.first_reading)),
        shown=None if artifact is None else _shown(entry, name, artifact, is_reused=False),
        has_page=True,
    )
    if artifact is not None:
        yield from _in_parent(entry, name, artifact)
    yield RunChange(name, time, status=_STAGE_STATUS[operation.outcome], ended=time)


def _reused_stage(entry: RunEntry, operation: RecordReuse) -> Iterator[Change]:
    name, artifact = operation.stage, operation.artifact
    stage = entry.stages[name]
    tags = _lineage_tags(entry, name) | {"vantage.digest": artifact.digest, "vantage.status": stage.outcome}
    shown = _shown(entry, name, artifact, is_reused=stage.outcome == "reused")
    yield _reading(entry, operation, tags, shown=shown)
    yield from _in_parent(entry, name, artifact)
    yield RunChange(name, operation.time, status=_STAGE_STATUS[stage.outcome], ended=stage.made)


def _answered(entry: RunEntry, answer: Approval) -> RunChange:
    """Show the answer in words, and all of it as JSON."""
    stage, tags = answer.question.stage, _fitting(answer_tags(answer))
    if stage not in entry.stages:
        return RunChange(stage, answer.time, tags)
    tags |= {"vantage.status": entry.stages[stage].outcome, **_remark_tags(entry, stage)}
    return RunChange(stage, answer.time, tags, has_page=True)


GUARD_TAGS = (ENDED_EARLY, GUARDS) = ("vantage.ended_early", "vantage.guards")


def guard_tags(artifact: Artifact) -> dict[str, str]:
    """Return the tags by which MLflow shows what a stage's guards saw, and that it ended early."""
    tags = {}
    if artifact.ended_early is not None:
        tags[ENDED_EARLY] = fit_tag(str(artifact.ended_early))
    if artifact.firings:
        tags[GUARDS] = fit_tag("\n".join(in_words(artifact.firings)))
    return tags


def _shown(entry: RunEntry, name: str, artifact: Artifact, *, is_reused: bool) -> ShownArtifact:
    stage, made = entry.stages[name], _made(entry, name)
    tags = {"vantage.digest": artifact.digest, "vantage.uri": artifact.uri}
    if warnings := warnings_of(artifact.metrics):
        tags["vantage.warnings"] = fit_tag("\n".join(warnings))
    tags |= guard_tags(artifact)
    if tokenizer := getattr(artifact, "tokenizer_digest", None):
        tags["vantage.tokenizer_digest"] = tokenizer
    # A headline metric belongs to the kept weights. Its step is one after the last step of the curve with its name.
    # Its time is the artifact's, since MLflow would store the same number twice at two times.
    last_steps = {metric: step for (of, metric), step in entry.last_steps.items() if of == name}
    rows = (
        (metric, value, made, last_steps.get(metric, -1) + 1)
        for metric, value in artifact.metrics.items()
        if value is not None
    )
    return ShownArtifact(
        artifact,
        tags,
        tuple(rows),
        model=expected_model(entry.run_id, stage, artifact) if artifact.kind in MODELS else None,
        candidate=stage.inputs.get("candidate") if artifact.kind == "evaluation" else None,
        dataset=measured_dataset(stage),
        is_reused=is_reused,
    )


def _in_parent(entry: RunEntry, name: str, artifact: Artifact) -> Iterator[RunChange]:
    """Yield a stage's headline metrics in the parent run, as ``stage.metric``, by which MLflow's list compares runs."""
    kind = KINDS.get(entry.stages[name].kind)  # None: a later version wrote the kind, or it was edited
    if kind is not None and kind.is_implicit:  # the numbers of implicit steps measure no run's quality
        return
    made = _made(entry, name)
    rows = (
        (f"{name}.{metric}", value, made, 0)
        for metric, value in artifact.metrics.items()
        if value is not None
    )
    yield RunChange(None, made, rows=tuple(rows))


def _made(entry: RunEntry, name: str) -> int:
    made = entry.stages[name].made
    assert made is not None, "an operation that has an artifact has its time"
    return made


def _lineage_tags(entry: RunEntry, name: str) -> dict[str, str]:
    stage = entry.stages[name]
    tags = {"vantage.kind": stage.kind, "vantage.stage_key": stage.stage_key}
    if stage.source_sha256:
        tags["vantage.source.sha256"] = stage.source_sha256
    return tags | {f"vantage.parent.{role}": given.artifact.digest for role, given in stage.inputs.items()}


def _verdict_tags(operation: RecordVerdicts) -> dict[str, str]:
    tags = {}
    if operation.verdicts:
        passed = all(verdict.passed for verdict in operation.verdicts)
        tags["vantage.verdict"] = "passed" if passed else "closed"
    for verdict in operation.verdicts:
        tags[f"vantage.gate.{verdict.metric}"] = str(verdict)
        tags[f"vantage.gate.{verdict.metric}.evidence"] = json.dumps(verdict.evidence, sort_keys=True)
    if operation.loosened:
        tags["vantage.loosened_gates"] = "; ".join(map(str, operation.loosened))
    return _fitting(tags)


def _remark_tags(entry: RunEntry, name: str) -> dict[str, str]:
    stage = entry.stages[name]
    remark = remark_on(stage.artifact, stage.inputs) if stage.artifact else None
    return {"vantage.remark": fit_tag(remark)} if remark else {}


def _params(value: object) -> dict[str, str]:
    return {name: fit_param(text) for name, text in flatten(value).items()}


def _fitting(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: fit_tag(text) for name, text in tags.items()}
