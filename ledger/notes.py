"""The Markdown of the MLflow pages of a run, a stage and a model."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from vantage.ledger.conclusions import alarms_in
from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.model_card import (
    Wording,
    answers,
    card_sections,
    in_markdown,
    parents_table,
    readers,
    written_by,
)
from vantage.ledger.operations import Input
from vantage.ledger.page_links import ArtifactKey, Link, artifact_key, linked, linked_run, words
from vantage.ledger.remarks import remark_on
from vantage.schemas.records.effects import effects_of
from vantage.schemas.records.estimate_warnings import warnings_about
from vantage.schemas.records.metric_warnings import dropped_summary
from vantage.schemas.records.metrics import unit_of
from vantage.schemas.records.uncertainty import Uncertainty, interval_among
from vantage.schemas.records.verdicts import DEFAULT_CONFIDENCE
from vantage.schemas.safe_text import markdown_text

BILL = "bill_of_materials.cdx.json"
"""The bill of materials among the artifacts of a stage's run."""
PAGES = Wording("Page", 1)
"""Wording of the pages of runs and stages. Raise its number when a sentence or a number is written in another way: an
audit compares the sentences only of pages with its own number."""


def run_note(
    entry: RunEntry,
    pages: Mapping[str, str],
    producers: Mapping[ArtifactKey, Link],
    links: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the run's page: the verdict and links, then every stage with its outcome, artifact, numbers, gates and parents.

    The verdict is the first text, since MLflow's list of runs shows some forty characters of it.

    ``pages``: stage → page of its run; ``producers``: artifact → run that made it; ``links``: text → other page.
    """
    head = [markdown_text(entry.conclusion)] if entry.conclusion is not None else []
    head.append(f"Recipe **{markdown_text(entry.name)}** · {words(entry.outcome)}")
    if links:
        head.append(f"**Links:** {' · '.join(linked(text, page) for text, page in links.items())}")
    head += [f"**Alarm:** {markdown_text(str(alarm))}" for alarm in alarms_in(entry)]
    if entry.report is not None:
        head.append(
            f"**Report:** `{entry.report}` under Artifacts: verdict, lineage, gates, curves, samples, cost"
        )
    for outcome in dict.fromkeys(stage.outcome for stage in entry.stages.values()):
        names = [name for name, stage in entry.stages.items() if stage.outcome == outcome]
        stages = " · ".join(linked(name, pages.get(name)) for name in names)
        head.append(f"**{words(outcome).capitalize()}:** {stages}")
    head.append(written_by(PAGES))
    lines = [
        "  \n".join(head),
        "",
        "| stage | outcome | artifact | numbers | gates | parents |",
        "|---|---|---|---|---|---|",
    ]
    for stage in entry.stages.values():
        page = linked(stage.name, pages.get(stage.name))
        gates = "<br>".join(markdown_text(str(verdict)) for verdict in stage.verdicts) or "–"
        parents = " · ".join(
            f"{role}: {linked(given.stage, pages.get(given.stage))}" for role, given in stage.inputs.items()
        )
        outcome = "<br>".join(
            each for each in (words(stage.outcome), _remark(stage), *_warnings(stage)) if each
        )
        lines.append(
            f"| {page} | {outcome} | {_artifact_cell(stage, producers)} | {'<br>'.join(numbers(stage)) or '–'} | {gates} "
            f"| {parents or '–'} |"
        )
    return "\n".join(lines)


def run_links(
    entry: RunEntry, *, all_runs: str, run_page: str | None, refused: Set[str] = frozenset()
) -> dict[str, str]:
    """Return text → page, for the links of the run's page.

    Args:
        entry: the run.
        all_runs: page of the list of the recipe's runs.
        run_page: the run's own page.
        refused: registered models that MLflow refused.
    """
    links = {"all runs of this recipe": all_runs}
    if entry.report is not None and run_page:
        links[entry.report] = f"{run_page}/artifacts/{entry.report}"
    for name, alias in entry.published.items():
        if name not in refused:
            links[f"registered model {name}{f'@{alias}' if alias else ''}"] = f"#/models/{name}"
    return links


def stage_note(
    entry: RunEntry,
    name: str,
    run_page: str,
    producers: Mapping[ArtifactKey, Link],
    pages: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return a stage's page: its inputs and the runs that made them, its gates, its artifact, and the stages that read it.

    MLflow shows only the first few lines at first, so the parents are in the second.

    ``pages``: stage → page of its run.
    """
    stage = entry.stages[name]
    attempt = f" · attempt {stage.attempt}" if stage.attempt else ""
    head = [
        f"**{stage.name}** · {words(stage.kind)}{attempt} · {words(stage.outcome)} "
        f"· a stage of run {linked(entry.run_id, run_page)}",
        f"**Parents:** {_parents_line(stage.inputs, producers)}",
    ]
    if read_by := readers(entry, name):
        head.append(f"**Read by:** {_readers_line(read_by, pages)}")
    if stage.outcome == "reused" and stage.artifact:
        producer = linked_run(producers.get(artifact_key(stage.artifact), Link()))
        head.append(f"**Reused:** made by {producer}, where its curves are; nothing was trained here.")
    if remark := _remark(stage):
        head.append(remark)
    if stage.artifact and (lost := dropped_summary(stage.artifact.metrics)):
        head.append(f"**Left out:** {markdown_text(lost)}")
    head += _warnings(stage)
    if stage.reason:
        head.append(markdown_text(stage.reason))
    head.append(written_by(PAGES))
    lines = ["  \n".join(head), *_titled("Parents", parents_table(stage, producers))]
    if stage.verdicts:
        lines += ["", "### Gates", "", *(f"- {markdown_text(str(verdict))}" for verdict in stage.verdicts)]
        lines += answers(entry, name)
    if of_stage := numbers(stage):
        lines += ["", "### Numbers", "", *(f"- {each}" for each in of_stage)]
    if stage.artifact:
        lines += ["", "### Artifact", "", f"- content digest `{stage.artifact.digest}`"]
        model = producers.get(artifact_key(stage.artifact), Link()).model
        if model:
            lines.append(f"- {linked('its page under Models', model)}")
        lines.append(f"- stage key `{stage.stage_key}`")
        if name in entry.bills:
            lines.append(f"- bill of materials (CycloneDX): `{BILL}` under Artifacts")
    return "\n".join(lines)


_MOST_NUMBERS = 3


def numbers(stage: StageEntry) -> list[str]:
    """Return a stage's most telling metrics in Markdown: each with four digits, its unit and its 95 % interval.

    These are the metrics with gates, else the effects of an evaluation, else the first metrics.
    """
    if stage.artifact is None:
        return []
    metrics, known = stage.artifact.metrics, stage.artifact.uncertainty
    named = [verdict.metric for verdict in stage.verdicts]
    named += [effect.metric for effect in effects_of(metrics, {}, {})]
    chosen = named or [name for name, value in metrics.items() if value]
    return [
        markdown_text(
            " ".join(filter(None, [name, _digits(value), unit_of(name), _interval(name, metrics, known)]))
        )
        for name in dict.fromkeys(chosen)
        if (value := metrics.get(name)) is not None
    ][:_MOST_NUMBERS]


def _digits(value: float) -> str:
    """Return four digits; whole numbers in full."""
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def _interval(name: str, metrics: Mapping[str, float | None], known: Mapping[str, Uncertainty]) -> str:
    found = interval_among(name, metrics, known, confidence=DEFAULT_CONFIDENCE)
    return "" if found is None else f"({found[0]:.4g} to {found[1]:.4g})"


@dataclass(frozen=True)
class ModelPages:
    """Addresses of a model's pages in MLflow."""

    run: str
    """Page of the stage's run."""
    run_of_all: str | None = None
    """Page of the parent run."""
    readers: Mapping[str, str] = field(default_factory=dict)
    """Stage that reads the model → page of its run."""
    registered: str | None = None
    """``NAME/VERSION``; None: this is not a version's page."""


def _maker(
    entry: RunEntry, stage: StageEntry, pages: ModelPages, producers: Mapping[ArtifactKey, Link]
) -> str:
    """Return the stage and the run that made the artifact; for a reused artifact that is an earlier run."""
    if stage.outcome == "reused" and stage.artifact is not None:
        made = linked_run(producers.get(artifact_key(stage.artifact), Link()))
        return f"{made} ({words(stage.kind)}), and reused in run {linked(entry.run_id, pages.run_of_all)}"
    run = f" of run {linked(entry.run_id, pages.run_of_all)}" if pages.run_of_all else ""
    return f"stage {linked(stage.name, pages.run)} ({words(stage.kind)}){run}"


def model_note(entry: RunEntry, name: str, pages: ModelPages, producers: Mapping[ArtifactKey, Link]) -> str:
    """Return a model's card: what it is and what it was made of, then gates, measurements, limits, data, licence and commands."""
    stage = entry.stages[name]
    head = [
        f"**{markdown_text(entry.name)}: {name}** · {words(stage.artifact.kind if stage.artifact else 'model')} made by "
        f"{_maker(entry, stage, pages, producers)}",
        f"**Parents:** {_parents_line(stage.inputs, producers)}",
    ]
    if read_by := readers(entry, name):
        head.append(f"**Read by:** {_readers_line(read_by, pages.readers)}")
    if remark := _remark(stage):
        head.append(remark)
    head += [*_warnings(stage), written_by()]
    sections = card_sections(entry, name, producers)
    use = _use(entry, stage, pages)
    parents = _titled("Parents", parents_table(stage, producers))
    return "\n".join(
        ["  \n".join(head), *in_markdown(sections, level=3), *_titled("Use and check", use), *parents]
    )


def _use(entry: RunEntry, stage: StageEntry, pages: ModelPages) -> list[str]:
    """Return how to load and serve the model, and how to follow it back to its data."""
    lines = []
    if stage.artifact is not None:
        lines.append(f"- content digest `{stage.artifact.digest}`, stage key `{stage.stage_key}`")
    if pages.registered is not None:
        name = pages.registered
        address = f"models:/{name}"
        lines += [
            f'- load it: `mlflow.transformers.load_model("{address}")`',
            f"- serve it: `mlflow models serve -m {address} --env-manager local`; the signature and an input example are its "
            "own, and `vantage export` writes a folder with the recipe's sampling and more ways to serve it",
            f"- check it back to the data: `vantage audit {name}`; `vantage sbom {name}`",
        ]
    else:
        lines.append(f"- check it back to the data: `vantage audit {entry.run_id}/{stage.name}`")
    if stage.name in entry.bills:
        bill = f"`{BILL}`"
        lines.append(
            f"- bill of materials (CycloneDX): {bill} under Artifacts of {linked(stage.name, pages.run)}"
        )
    return lines


def _readers_line(read_by: Mapping[str, Sequence[str]], pages: Mapping[str, str]) -> str:
    return " · ".join(
        f"{linked(name, pages.get(name))} ({', '.join(roles)})" for name, roles in read_by.items()
    )


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"### {title}", "", *lines] if lines else []


def stage_and_evaluations(entry: RunEntry, stage: str) -> list[StageEntry]:
    """Return the stage itself, and the evaluations of this run with its artifact as candidate."""
    evaluations = [
        each
        for each in entry.stages.values()
        if each.kind == "evaluation"
        and "candidate" in each.inputs
        and each.inputs["candidate"].stage == stage
    ]
    return [*([entry.stages[stage]] if stage in entry.stages else []), *evaluations]


def model_tags(entry: RunEntry, stage: str) -> dict[str, str]:
    """Return the tags of a model: gates and evaluations, ``vantage.gate.STAGE.METRIC`` and ``vantage.measured.STAGE.METRIC``."""
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
    warnings = warnings_about(stage.artifact) if stage.artifact else ()
    return [
        *(f"**Warning:** {markdown_text(warning)}" for warning in warnings),
        *(f"**Loosened gate:** {markdown_text(str(gate))}" for gate in stage.loosened),
    ]


def _parents_line(inputs: Mapping[str, Input], producers: Mapping[ArtifactKey, Link]) -> str:
    if not inputs:
        return "none; this stage reads a source from outside"
    return " · ".join(
        f"{role}: {linked(given.stage, producers.get(artifact_key(given.artifact), Link()).run)}"
        for role, given in inputs.items()
    )


def _artifact_cell(stage: StageEntry, producers: Mapping[ArtifactKey, Link]) -> str:
    if stage.artifact is None:
        return "–"
    link = producers.get(artifact_key(stage.artifact), Link())
    kind = linked(words(stage.artifact.kind), link.model)
    made_by = f" made by {linked_run(link)}" if stage.outcome == "reused" else ""
    return f"{kind} `{stage.artifact.digest[:12]}`{made_by}"
