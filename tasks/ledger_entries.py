"""What is told to the ledger, what it adds up to, and how a person reads it. Nothing here knows MLflow.

Every operation carries the time at which it happened, so sending it late, or twice, records the same thing.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from schemas.artifacts import Artifact
from schemas.frozen import Frozen
from schemas.verdicts import Verdict

StageOutcome = Literal["completed", "gate_closed", "failed", "resumable"]
RunOutcome = Literal["completed", "gate_closed", "failed", "resumable"]

MetricRow = tuple[str, float, int, int]
"""Name, value, time (milliseconds since 1970), step."""


class Input(Frozen):
    """An artifact that a stage reads, and the stage of this recipe that it comes from."""

    stage: str
    artifact: Artifact


class OpenRun(Frozen):
    """A run starts, or goes on."""

    operation: Literal["open_run"] = "open_run"
    time: int
    run_id: str
    experiment: str
    name: str
    recipe: dict[str, Any]


class OpenStage(Frozen):
    """An attempt at a stage starts."""

    operation: Literal["open_stage"] = "open_stage"
    time: int
    stage: str
    kind: str
    stage_key: str
    attempt: int
    params: dict[str, Any]
    inputs: dict[str, Input]


class LogMetrics(Frozen):
    """Rows of a stage's metric journal, up to a committed checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="constants")

    operation: Literal["log_metrics"] = "log_metrics"
    stage: str
    rows: tuple[MetricRow, ...]


class RecordVerdicts(Frozen):
    """What a stage's gates said."""

    operation: Literal["record_verdicts"] = "record_verdicts"
    time: int
    stage: str
    verdicts: tuple[Verdict, ...]


class FinishStage(Frozen):
    """An attempt at a stage ends."""

    operation: Literal["finish_stage"] = "finish_stage"
    time: int
    stage: str
    outcome: StageOutcome
    artifact: Artifact | None
    provenance: dict[str, str]
    reason: str | None


class RecordReuse(Frozen):
    """A stage was not run, since its artifact was there."""

    operation: Literal["record_reuse"] = "record_reuse"
    time: int
    stage: str
    kind: str
    stage_key: str
    params: dict[str, Any]
    inputs: dict[str, Input]
    artifact: Artifact


class FinishRun(Frozen):
    """A run ends, for now or for good."""

    operation: Literal["finish_run"] = "finish_run"
    time: int
    outcome: RunOutcome


class CloseRun(Frozen):
    """Another run's process is known to be dead: what it left running is closed."""

    operation: Literal["close_run"] = "close_run"
    time: int
    run_id: str
    reason: str


class Publish(Frozen):
    """An artifact becomes a version of a registered model."""

    operation: Literal["publish"] = "publish"
    time: int
    stage: str
    artifact: Artifact
    folder: str
    registered_model: str
    alias: str | None


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
)
_OPERATION: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Field(discriminator="operation")])


def to_json(operation: Operation) -> dict[str, Any]:
    """The operation as it lies in the outbox."""
    return operation.model_dump(mode="json")


def from_json(value: Mapping[str, Any]) -> Operation:
    """The operation that lies in the outbox; pydantic's ValidationError for what is none."""
    return _OPERATION.validate_python(value, strict=False)


@dataclass(frozen=True)
class StageEntry:
    """What is known of one stage of the run."""

    name: str
    kind: str
    stage_key: str
    inputs: dict[str, Input]
    attempt: int | None = None
    outcome: str = "running"
    reason: str | None = None
    artifact: Artifact | None = None
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class RunEntry:
    """What a run's operations add up to."""

    run_id: str
    experiment: str
    name: str
    openings: int = 1
    """How often the run was started or taken over."""
    outcome: str = "running"
    stages: dict[str, StageEntry] = field(default_factory=dict)
    last_steps: dict[tuple[str, str], int] = field(default_factory=dict)
    """(Stage, metric) → the last step that was told."""


def after(entry: RunEntry | None, operation: Operation) -> RunEntry:
    """The run's entry after one more operation; ValueError for one that cannot come here."""
    if isinstance(operation, OpenRun):
        if entry is None:
            return RunEntry(run_id=operation.run_id, experiment=operation.experiment, name=operation.name)
        return replace(entry, outcome="running", openings=entry.openings + 1)
    if entry is None:
        raise ValueError(f"{operation.operation} before open_run; a run's first operation is open_run")
    match operation:
        case OpenStage():
            known = entry.stages.get(operation.stage)
            stage = StageEntry(
                name=operation.stage,
                kind=operation.kind,
                stage_key=operation.stage_key,
                inputs=operation.inputs,
                attempt=operation.attempt,
                artifact=known.artifact if known else None,
                verdicts=known.verdicts if known else (),
            )
        case RecordReuse():
            known = entry.stages.get(operation.stage)
            made_here = known is not None and known.attempt is not None and known.outcome != "reused"
            stage = StageEntry(
                name=operation.stage,
                kind=operation.kind,
                stage_key=operation.stage_key,
                inputs=operation.inputs,
                attempt=known.attempt if known else None,
                outcome="completed" if made_here else "reused",
                artifact=operation.artifact,
                verdicts=known.verdicts if known else (),
            )
        case RecordVerdicts():
            stage = replace(_stage(entry, operation.stage), verdicts=operation.verdicts)
        case FinishStage():
            known = _stage(entry, operation.stage)
            stage = replace(
                known,
                outcome=operation.outcome,
                reason=operation.reason,
                artifact=operation.artifact or known.artifact,
            )
        case LogMetrics():
            last = {(operation.stage, name): step for name, _, _, step in operation.rows}
            return replace(entry, last_steps={**entry.last_steps, **last})
        case FinishRun():
            return replace(entry, outcome=operation.outcome)
        case _:
            return entry
    return replace(entry, stages={**entry.stages, stage.name: stage})


def _stage(entry: RunEntry, name: str) -> StageEntry:
    if name not in entry.stages:
        raise ValueError(f"stage {name!r} was never opened in run {entry.run_id}; open or reuse it first")
    return entry.stages[name]


def new_rows(entry: RunEntry, stage: str, rows: list[MetricRow]) -> list[MetricRow]:
    """Rows beyond the last step that was told of their metric.

    A journal is written in the order of its steps, one value a metric and step. What a retried or rolled-back
    attempt measures again is therefore left out, and a curve never has two points at one step.
    """
    last = {name: step for (of, name), step in entry.last_steps.items() if of == stage}
    fresh = []
    for row in rows:
        name, _, _, step = row
        if step > last.get(name, -1):
            last[name] = step
            fresh.append(row)
    return fresh


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as ``stages.policy.algorithm.gamma`` → text; lists by their position.

    >>> flatten({"a": {"b": 1.0, "c": None}, "d": [True, "x"]})
    {'a.b': '1.0', 'a.c': 'null', 'd.0': 'true', 'd.1': 'x'}
    """
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    elif isinstance(value, str):
        return {prefix: value}
    else:
        return {prefix: json.dumps(value)}
    if not items:
        return {prefix: "{}" if isinstance(value, Mapping) else "[]"} if prefix else {}
    flat: dict[str, str] = {}
    for key, inner in items:
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


@dataclass(frozen=True)
class Link:
    """Where an artifact stands in MLflow: the run that made it and its model, by their pages."""

    run: str | None = None
    run_name: str | None = None
    model: str | None = None


def run_note(entry: RunEntry, pages: Mapping[str, str], makers: Mapping[str, Link]) -> str:
    """The run's page: every stage with its outcome, artifact, gates and parents.

    ``pages``: stage → page of its run; ``makers``: content digest → what made it.
    """
    head = [f"Recipe **{_cell(entry.name)}** · {_words(entry.outcome)}"]
    for outcome in dict.fromkeys(stage.outcome for stage in entry.stages.values()):
        names = [name for name, stage in entry.stages.items() if stage.outcome == outcome]
        stages = " · ".join(_linked(name, pages.get(name)) for name in names)
        head.append(f"**{_words(outcome).capitalize()}:** {stages}")
    lines = [
        "  \n".join(head),
        "",
        "| stage | outcome | artifact | gates | parents |",
        "|---|---|---|---|---|",
    ]
    for stage in entry.stages.values():
        page = _linked(stage.name, pages.get(stage.name))
        gates = "<br>".join(_cell(str(verdict)) for verdict in stage.verdicts) or "–"
        parents = " · ".join(
            f"{role}: {_linked(given.stage, pages.get(given.stage))}" for role, given in stage.inputs.items()
        )
        lines.append(
            f"| {page} | {_words(stage.outcome)} | {_artifact_cell(stage, makers)} | {gates} | {parents or '–'} |"
        )
    return "\n".join(lines)


def stage_note(entry: RunEntry, name: str, run_page: str, makers: Mapping[str, Link]) -> str:
    """A stage's page: from what it was made, by whom, and what it gave.

    MLflow shows the first few lines and folds the rest away, so the parents stand in the second.
    """
    stage = entry.stages[name]
    attempt = f" · attempt {stage.attempt}" if stage.attempt else ""
    head = [
        f"**{stage.name}** · {_words(stage.kind)}{attempt} · {_words(stage.outcome)} "
        f"· a stage of run {_linked(entry.run_id, run_page)}",
        f"**Parents:** {_parents_line(stage.inputs, makers)}",
    ]
    if stage.outcome == "reused" and stage.artifact:
        maker = _linked_run(makers.get(stage.artifact.digest, Link()))
        head.append(f"**Reused:** made by {maker}, where its curves are; nothing was trained here.")
    if stage.reason:
        head.append(_cell(stage.reason))
    lines = ["  \n".join(head), *_parents_table(stage.inputs, makers)]
    if stage.verdicts:
        lines += ["", "### Gates", "", *(f"- {verdict}" for verdict in stage.verdicts)]
    if stage.artifact:
        lines += ["", "### Artifact", "", f"- content digest `{stage.artifact.digest}`"]
        model = makers.get(stage.artifact.digest, Link()).model
        if model:
            lines.append(f"- {_linked('its page under Models', model)}")
        lines.append(f"- stage key `{stage.stage_key}`")
    return "\n".join(lines)


def artifact_note(stage: StageEntry, run_page: str, makers: Mapping[str, Link]) -> str:
    """A model's page: which stage made it, and from what."""
    head = [
        f"Made by stage {_linked(stage.name, run_page)} ({_words(stage.kind)}).",
        f"**Parents:** {_parents_line(stage.inputs, makers)}",
    ]
    return "\n".join(["  \n".join(head), *_parents_table(stage.inputs, makers)])


def _parents_line(inputs: Mapping[str, Input], makers: Mapping[str, Link]) -> str:
    if not inputs:
        return "none; this stage reads a source from outside"
    return " · ".join(
        f"{role}: {_linked(given.stage, makers.get(given.artifact.digest, Link()).run)}"
        for role, given in inputs.items()
    )


def _parents_table(inputs: Mapping[str, Input], makers: Mapping[str, Link]) -> list[str]:
    if not inputs:
        return []
    lines = ["", "### Parents", "", "| role | kind | made by | content digest |", "|---|---|---|---|"]
    for role, given in inputs.items():
        link = makers.get(given.artifact.digest, Link())
        kind = _linked(_words(given.artifact.kind), link.model)
        lines.append(f"| {role} | {kind} | {_linked_run(link)} | `{given.artifact.digest[:16]}` |")
    return lines


def _artifact_cell(stage: StageEntry, makers: Mapping[str, Link]) -> str:
    if stage.artifact is None:
        return "–"
    link = makers.get(stage.artifact.digest, Link())
    kind = _linked(_words(stage.artifact.kind), link.model)
    made_by = f" made by {_linked_run(link)}" if stage.outcome == "reused" else ""
    return f"{kind} `{stage.artifact.digest[:12]}`{made_by}"


def _linked_run(link: Link) -> str:
    return _linked(link.run_name or "run", link.run) if link.run else "a run that this server does not know"


def _linked(text: str, page: str | None) -> str:
    return f"[{_cell(text)}]({page})" if page else _cell(text)


def _cell(text: str) -> str:
    """Text that can end neither a cell of a table nor a link."""
    return re.sub(r"([|\[\]`*<>])", r"\\\1", " ".join(text.split()))


def _words(name: str) -> str:
    return name.replace("_", " ")
