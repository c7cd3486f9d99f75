"""The Markdown of the MLflow pages of a run, a stage and a model."""

from collections.abc import Mapping
from dataclasses import dataclass

from ledger.entries import RunEntry, StageEntry
from ledger.operations import Input
from ledger.remarks import remark_on
from schemas.records.artifacts import Artifact
from schemas.records.metric_warnings import dropped_summary, warnings_of
from schemas.safe_text import markdown_text


@dataclass(frozen=True)
class Link:
    """An artifact in MLflow: the pages of the run that made it and of its model."""

    run: str | None = None
    run_name: str | None = None
    model: str | None = None


ArtifactKey = tuple[str, str]
"""Digest and stage key of an artifact: two stages may make equal artifacts."""


def artifact_key(artifact: Artifact) -> ArtifactKey:
    """The artifact's digest and stage key."""
    return artifact.digest, artifact.stage_key


def run_note(entry: RunEntry, pages: Mapping[str, str], producers: Mapping[ArtifactKey, Link]) -> str:
    """The run's page: every stage with its outcome, artifact, gates and parents.

    ``pages``: stage → page of its run; ``producers``: artifact → run that made it.
    """
    head = [f"Recipe **{markdown_text(entry.name)}** · {_words(entry.outcome)}"]
    if entry.report is not None:
        head.append(f"**Report:** `{entry.report}` under Artifacts: lineage, gates, curves, samples, cost")
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
        gates = "<br>".join(markdown_text(str(verdict)) for verdict in stage.verdicts) or "–"
        parents = " · ".join(
            f"{role}: {_linked(given.stage, pages.get(given.stage))}" for role, given in stage.inputs.items()
        )
        outcome = "<br>".join(
            each for each in (_words(stage.outcome), _remark(stage), *_warnings(stage)) if each
        )
        lines.append(
            f"| {page} | {outcome} | {_artifactmarkdown_text(stage, producers)} | {gates} | {parents or '–'} |"
        )
    return "\n".join(lines)


def stage_note(entry: RunEntry, name: str, run_page: str, producers: Mapping[ArtifactKey, Link]) -> str:
    """A stage's page: its inputs and the runs that made them, its gates and its artifact.

    MLflow shows only the first few lines at first, so the parents are in the second.
    """
    stage = entry.stages[name]
    attempt = f" · attempt {stage.attempt}" if stage.attempt else ""
    head = [
        f"**{stage.name}** · {_words(stage.kind)}{attempt} · {_words(stage.outcome)} "
        f"· a stage of run {_linked(entry.run_id, run_page)}",
        f"**Parents:** {_parents_line(stage.inputs, producers)}",
    ]
    if stage.outcome == "reused" and stage.artifact:
        producer = _linked_run(producers.get(artifact_key(stage.artifact), Link()))
        head.append(f"**Reused:** made by {producer}, where its curves are; nothing was trained here.")
    if remark := _remark(stage):
        head.append(remark)
    if stage.artifact and (lost := dropped_summary(stage.artifact.metrics)):
        head.append(f"**Left out:** {markdown_text(lost)}")
    head += _warnings(stage)
    if stage.reason:
        head.append(markdown_text(stage.reason))
    lines = ["  \n".join(head), *_parents_table(stage.inputs, producers)]
    if stage.verdicts:
        lines += ["", "### Gates", "", *(f"- {markdown_text(str(verdict))}" for verdict in stage.verdicts)]
        lines += _answers(entry, name)
    if stage.artifact:
        lines += ["", "### Artifact", "", f"- content digest `{stage.artifact.digest}`"]
        model = producers.get(artifact_key(stage.artifact), Link()).model
        if model:
            lines.append(f"- {_linked('its page under Models', model)}")
        lines.append(f"- stage key `{stage.stage_key}`")
    return "\n".join(lines)


def artifact_note(
    entry: RunEntry, stage: StageEntry, run_page: str, producers: Mapping[ArtifactKey, Link]
) -> str:
    """A model's page: the stage that made it, its inputs, its gates and its evaluations."""
    head = [
        f"ArtifactKey by stage {_linked(stage.name, run_page)} ({_words(stage.kind)}).",
        f"**Parents:** {_parents_line(stage.inputs, producers)}",
    ]
    if remark := _remark(stage):
        head.append(remark)
    head += _warnings(stage)
    gates = [
        f"- {of.name}: {markdown_text(str(verdict))}"
        for of in stage_and_evaluations(entry, stage.name)
        for verdict in of.verdicts
    ]
    gates += [line for of in stage_and_evaluations(entry, stage.name) for line in _answers(entry, of.name)]
    measured = [
        f"- {of.name}: {metric} {value:.6g}"
        for of in stage_and_evaluations(entry, stage.name)
        if of.artifact
        for metric, value in of.artifact.metrics.items()
        if value is not None
    ]
    sections = [("### Gates", gates), ("### Measured", measured)]
    text = [line for title, lines in sections if lines for line in ("", title, "", *lines)]
    return "\n".join(["  \n".join(head), *text, *_parents_table(stage.inputs, producers)])


def _answers(entry: RunEntry, stage: str) -> list[str]:
    """What people answered about the stage's gates, and about aliases for its artifact."""
    return [
        f"- {markdown_text(f'{answer.question.subject} {answer}')}"
        for answer in entry.approvals
        if answer.question.stage == stage
    ]


def stage_and_evaluations(entry: RunEntry, stage: str) -> list[StageEntry]:
    """The stage itself, and the evaluations of this run with its artifact as candidate."""
    evaluations = [
        each
        for each in entry.stages.values()
        if each.kind == "evaluation"
        and "candidate" in each.inputs
        and each.inputs["candidate"].stage == stage
    ]
    return [*([entry.stages[stage]] if stage in entry.stages else []), *evaluations]


def model_tags(entry: RunEntry, stage: str) -> dict[str, str]:
    """Tags of a model: gates and evaluations, ``vantage.gate.STAGE.METRIC`` and ``vantage.measured.STAGE.METRIC``."""
    facts = {}
    for of in stage_and_evaluations(entry, stage):
        for verdict in of.verdicts:
            facts[f"vantage.gate.{of.name}.{verdict.metric}"] = str(verdict)
        for metric, value in (of.artifact.metrics if of.artifact else {}).items():
            if value is not None:
                facts[f"vantage.measured.{of.name}.{metric}"] = f"{value:.6g}"
    return facts


def _remark(stage: StageEntry) -> str | None:
    remark = remark_on(stage.artifact, stage.inputs) if stage.artifact else None
    return f"**{markdown_text(remark)}**" if remark else None


def _warnings(stage: StageEntry) -> list[str]:
    metrics = stage.artifact.metrics if stage.artifact else {}
    return [f"**Warning:** {markdown_text(warning)}" for warning in warnings_of(metrics)]


def _parents_line(inputs: Mapping[str, Input], producers: Mapping[ArtifactKey, Link]) -> str:
    if not inputs:
        return "none; this stage reads a source from outside"
    return " · ".join(
        f"{role}: {_linked(given.stage, producers.get(artifact_key(given.artifact), Link()).run)}"
        for role, given in inputs.items()
    )


def _parents_table(inputs: Mapping[str, Input], producers: Mapping[ArtifactKey, Link]) -> list[str]:
    if not inputs:
        return []
    lines = ["", "### Parents", "", "| role | kind | made by | content digest |", "|---|---|---|---|"]
    for role, given in inputs.items():
        link = producers.get(artifact_key(given.artifact), Link())
        kind = _linked(_words(given.artifact.kind), link.model)
        lines.append(f"| {role} | {kind} | {_linked_run(link)} | `{given.artifact.digest[:16]}` |")
    return lines


def _artifactmarkdown_text(stage: StageEntry, producers: Mapping[ArtifactKey, Link]) -> str:
    if stage.artifact is None:
        return "–"
    link = producers.get(artifact_key(stage.artifact), Link())
    kind = _linked(_words(stage.artifact.kind), link.model)
    made_by = f" made by {_linked_run(link)}" if stage.outcome == "reused" else ""
    return f"{kind} `{stage.artifact.digest[:12]}`{made_by}"


def _linked_run(link: Link) -> str:
    return _linked(link.run_name or "run", link.run) if link.run else "a run that this server does not know"


def _linked(text: str, page: str | None) -> str:
    return f"[{markdown_text(text)}]({page})" if page else markdown_text(text)


def _words(name: str) -> str:
    return name.replace("_", " ")
