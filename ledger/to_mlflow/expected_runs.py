"""What MLflow has of a run if it has all that its outbox told, and nothing that nobody told.

It says in plain data what ``run_writer`` writes, operation by operation. What only the server decides (its ids) is left out.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from vantage.ledger.entries import RunEntry
from vantage.ledger.operations import (
    FinishRun,
    FinishStage,
    Input,
    LogMetrics,
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
from vantage.ledger.replay import Told
from vantage.ledger.to_mlflow.answer_tags import alias_tags, answer_tags
from vantage.ledger.to_mlflow.artifact_fields import (
    dataset_fields,
    model_name,
    model_params,
    source_fields,
    source_tags,
)
from vantage.ledger.to_mlflow.energy_tags import energy_tags
from vantage.ledger.to_mlflow.writing import fit_param, fit_tag, flatten
from vantage.schemas.kind import MODELS
from vantage.schemas.kinds import KINDS
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.artifacts import Artifact, Dataset
from vantage.schemas.records.metric_warnings import warnings_of

Row = tuple[str, int, int, float]
"""Metric, time (milliseconds since 1970), step, value: what makes two rows of MLflow one."""

_MAX_FLOAT = 1.7976931348623157e308
"""How MLflow stores infinity."""


@dataclass
class ExpectedRun:
    """One of MLflow's runs: of a stage, or the parent of them all."""

    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    rows: set[Row] = field(default_factory=set)
    datasets: dict[str, dict[str, str]] = field(default_factory=dict)
    """Content digest → tags of the dataset's input."""
    optional_datasets: dict[str, dict[str, str]] = field(default_factory=dict)
    """The same of a source file: a run that an earlier version recorded has none."""
    dataset_fields: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Content digest → MLflow's own fields of it, one for each step that it comes from."""
    model: dict[str, str] = field(default_factory=dict)
    """Of an artifact that is a model: name and kind of its logged model, and its params as ``params.NAME``."""
    optional_tags: dict[str, str] = field(default_factory=dict)
    """Of a stage that was reused: only where the server did not know who had made it."""
    optional_rows: set[Row] = field(default_factory=set)


def expected_runs(told: Iterable[Told]) -> dict[str | None, ExpectedRun]:
    """Stage → its run after these operations; None → the parent run."""
    expected = _Expected()
    for each in told:
        expected.apply(each.entry, each.operation)
    return expected.runs


def row_of(name: str, value: float, time: int, step: int) -> Row:
    """Return a row as MLflow gives it back: NaN as ``nan``, infinity as the largest number."""
    if math.isnan(value):
        return name, time, step, math.nan  # the one object, since no NaN equals another
    if math.isinf(value):
        value = math.copysign(_MAX_FLOAT, value)
    return name, time, step, value


class _Expected:
    """The runs so far."""

    def __init__(self) -> None:
        self.runs: dict[str | None, ExpectedRun] = {}
        self._opening: OpenRun | None = None

    def apply(self, entry: RunEntry, operation: Operation) -> None:
        """Apply one operation; ``entry`` is the run's state after it."""
        match operation:
            case OpenRun():
                self._opening = self._opening or operation
                parent = self._run(None)
                parent.tags |= {"vantage.status": "running", **operation.origin}
                parent.params |= _params(operation.recipe)
            case OpenStage():
                stage = self._run(operation.stage)
                self._inputs(entry, operation.stage)
                stage.tags |= entry.origin
                stage.tags |= {"vantage.status": "running", "vantage.attempt": str(operation.attempt)}
                stage.params |= _params(operation.params)
            case LogMetrics():
                rows = self._run(operation.stage).rows
                rows |= {row_of(name, value, time, step) for name, value, time, step in operation.rows}
            case RecordVerdicts():
                self._verdicts(operation)
            case FinishStage():
                stage = self._run(operation.stage)
                stage.tags |= {
                    f"vantage.provenance.{part}": value for part, value in operation.provenance.items()
                }
                stage.tags |= energy_tags(operation.energy)
                stage.tags["vantage.status"] = operation.outcome
                if operation.artifact is not None:
                    self._artifact(entry, operation.stage, operation.artifact, is_certain=True)
            case RecordReuse():
                self._reuse(entry, operation)
            case FinishRun():
                self._run(None).tags["vantage.status"] = operation.outcome
            case Publish():
                self._run(operation.stage)
            case RecordApproval():
                self._answer(entry, operation.approval)
            case MoveAlias():
                tags = self._run(operation.stage).tags
                tags |= {name: fit_tag(text) for name, text in alias_tags(operation).items()}
            case _:
                pass
        if isinstance(operation, OpenStage | RecordVerdicts | FinishStage | RecordReuse):
            self._remark(entry, operation.stage)

    def _run(self, stage: str | None) -> ExpectedRun:
        if stage in self.runs:
            return self.runs[stage]
        assert self._opening is not None, "an outbox begins with it"
        made = ExpectedRun(tags={"vantage.run_id": self._opening.run_id, **self._opening.origin})
        made.tags |= {"vantage.recipe": self._opening.name} if stage is None else {"vantage.stage": stage}
        self.runs[stage] = made
        return made

    def _inputs(self, entry: RunEntry, name: str) -> None:
        stage, run = entry.stages[name], self._run(name)
        run.tags |= {"vantage.kind": stage.kind, "vantage.stage_key": stage.stage_key}
        if stage.source_sha256:
            run.tags["vantage.source.sha256"] = stage.source_sha256
        if stage.kind == "prepare_data" and stage.source_sha256 and stage.source:
            run.optional_datasets[stage.source_sha256] = source_tags(stage.source_sha256)
            of_source = source_fields(stage.name, stage.source, stage.source_sha256)
            run.dataset_fields.setdefault(stage.source_sha256, []).append(of_source)
        for role, given in stage.inputs.items():
            run.tags[f"vantage.parent.{role}"] = given.artifact.digest
            if isinstance(given.artifact, Dataset):
                tags = _dataset_tags(entry, stage.kind, given)
                run.datasets[given.artifact.digest] = tags
                fields = run.dataset_fields.setdefault(given.artifact.digest, [])
                fields.append(dataset_fields(given, tags.get("vantage.source.sha256")))

    def _verdicts(self, operation: RecordVerdicts) -> None:
        tags = self._run(operation.stage).tags
        if operation.verdicts:
            passed = all(verdict.passed for verdict in operation.verdicts)
            tags["vantage.verdict"] = "passed" if passed else "closed"
        for verdict in operation.verdicts:
            tags[f"vantage.gate.{verdict.metric}"] = fit_tag(str(verdict))
            evidence = json.dumps(verdict.evidence, sort_keys=True)
            tags[f"vantage.gate.{verdict.metric}.evidence"] = fit_tag(evidence)

    def _answer(self, entry: RunEntry, answer: Approval) -> None:
        stage = answer.question.stage
        tags = self._run(stage).tags
        tags |= {name: fit_tag(text) for name, text in answer_tags(answer).items()}
        if stage in entry.stages:
            tags["vantage.status"] = entry.stages[stage].outcome

    def _reuse(self, entry: RunEntry, operation: RecordReuse) -> None:
        stage = self._run(operation.stage)
        self._inputs(entry, operation.stage)
        outcome = entry.stages[operation.stage].outcome
        self._artifact(entry, operation.stage, operation.artifact, is_certain=outcome != "reused")
        stage.tags |= {"vantage.digest": operation.artifact.digest, "vantage.status": outcome}
        stage.params |= _params(operation.params)

    def _artifact(self, entry: RunEntry, stage: str, artifact: Artifact, *, is_certain: bool) -> None:
        """Tags and headline metrics; ``is_certain``: wherever the server knows who made it."""
        run, made = self._run(stage), entry.stages[stage].made
        assert made is not None, "the entry has an artifact"
        tags = {"vantage.digest": artifact.digest, "vantage.uri": artifact.uri}
        if warnings := warnings_of(artifact.metrics):
            tags["vantage.warnings"] = fit_tag("\n".join(warnings))
        if tokenizer := getattr(artifact, "tokenizer_digest", None):
            tags["vantage.tokenizer_digest"] = tokenizer
        if artifact.kind in MODELS:
            run.model = {"name": model_name(stage), "kind": artifact.kind}
            for name, value in model_params(entry.stages[stage].inputs).items():
                run.model[f"params.{name}"] = value
        last = {name: step for (of, name), step in entry.last_steps.items() if of == stage}
        measured = [(name, value) for name, value in artifact.metrics.items() if value is not None]
        rows = {row_of(name, value, made, last.get(name, -1) + 1) for name, value in measured}
        if is_certain:
            run.tags |= tags
            run.rows |= rows
        else:
            run.optional_tags |= tags
            run.optional_rows |= rows
        if not KINDS[entry.stages[stage].kind].is_implicit:
            self._run(None).rows |= {row_of(f"{stage}.{name}", value, made, 0) for name, value in measured}

    def _remark(self, entry: RunEntry, stage: str) -> None:
        of = entry.stages[stage]
        if of.artifact and (remark := remark_on(of.artifact, of.inputs)):
            self._run(stage).tags["vantage.remark"] = fit_tag(remark)


def _params(value: object) -> dict[str, str]:
    return {name: fit_param(text) for name, text in flatten(value).items()}


def _dataset_tags(entry: RunEntry, kind: str, given: Input) -> dict[str, str]:
    tags = {
        "mlflow.data.context": "evaluation" if kind == "evaluation" else "training",
        "vantage.digest": given.artifact.digest,
    }
    prepared = entry.stages.get(given.stage)
    if prepared is not None and prepared.source_sha256:
        tags["vantage.source.sha256"] = prepared.source_sha256
    return tags
