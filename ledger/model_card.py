"""Write the card of a model: its data, gates, measurements, limits and licence, and the commands that check it.

The same text is on MLflow's pages of the model and in an exported folder. It is made only from the run's records.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.page_links import ArtifactKey, Link, artifact_key, linked, linked_run, words
from vantage.schemas.recipe.extending import PREVIOUS, PREVIOUS_STATE
from vantage.schemas.recipe.sources import Builtin, model_source
from vantage.schemas.recipe.work import MODEL_IMPORTS, SOURCE
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.estimate_warnings import warnings_about
from vantage.schemas.records.extensions import STATE_KIND
from vantage.schemas.records.metric_warnings import dropped_summary
from vantage.schemas.records.metrics import METRICS
from vantage.schemas.records.uncertainty import interval_among
from vantage.schemas.records.verdicts import DEFAULT_CONFIDENCE
from vantage.schemas.safe_text import markdown_text, without_secrets

CARD = 1
"""Number of the wording of cards. Raise it when a sentence or a number is written in another way: an audit compares the
sentences only of cards with its own number."""

_OUR_LICENCE = "Apache-2.0"
_MOST_ROWS = 16
"""Most rows of the table of measurements; the run's page has all."""
_MEASURED_ROLE = {
    "evaluation": "candidate",
    "reward_evaluation": "reward_model",
    "benchmark_evaluation": "policy",
}
"""Kind of stage → the role of the model that such a stage measures."""
_SPLITS = ("train_rows", "validation_rows", "test_rows")
_FAMILIES = {metric.name: metric.family for metric in METRICS if metric.family}

NO_LICENCE = "not recorded"


class Wording(NamedTuple):
    """A kind of text whose sentences an audit derives again, and the number of its wording."""

    text: str
    number: int


CARDS = Wording("Card", CARD)


@cache  # an audit calls this for each card, and the answer is read from a file
def written_by(wording: Wording = CARDS) -> str:
    """Return the line of a text that names the version of its wording."""
    try:
        vantage = version("vantage-rlhf")
    except PackageNotFoundError:
        vantage = "unknown"
    return f"{wording.text} {wording.number} of Vantage {vantage}."


def card_sections(entry: RunEntry, name: str, producers: Mapping[ArtifactKey, Link]) -> dict[str, list[str]]:
    """Return title → lines in Markdown, in reading order; empty sections are left out.

    Args:
        entry: the run.
        name: the stage that made the model.
        producers: artifact → its pages in MLflow; empty where there are none.
    """
    sections = {
        "Gates": _gates(entry, name),
        "Measured": _measured(entry, name),
        "Limits": _limits(entry, name),
        "Data": _data(entry, name, producers),
        "Licence": _licence(entry, name),
    }
    return {title: lines for title, lines in sections.items() if lines}


def stage_and_measurements(entry: RunEntry, stage: str) -> list[StageEntry]:
    """Return the stage itself, and the stages of this run that measured its model."""
    evaluations = [
        each
        for each in entry.stages.values()
        if (measured := each.inputs.get(_MEASURED_ROLE.get(each.kind, ""))) and measured.stage == stage
    ]
    return [*([entry.stages[stage]] if stage in entry.stages else []), *evaluations]


def ancestors(entry: RunEntry, name: str) -> list[str]:
    """Return the stages whose artifacts are inputs of the stage's artifact, at any depth, in the order of the run."""
    found, waiting = set[str](), [name]
    while waiting:
        stage = entry.stages.get(waiting.pop())
        read = {given.stage for given in stage.inputs.values()} if stage else set()
        waiting += read - found
        found |= read
    return [each for each in entry.stages if each in found and each != name]


def readers(entry: RunEntry, name: str) -> dict[str, list[str]]:
    """Return stage of this run that reads the stage's artifact → the roles in which it does."""
    return {
        each.name: roles
        for each in entry.stages.values()
        if (roles := [role for role, given in each.inputs.items() if given.stage == name])
    }


def answers(entry: RunEntry, stage: str) -> list[str]:
    """Return people's answers about the stage's gates, and about aliases for its artifact."""
    return [
        f"- {markdown_text(f'{answer.question.subject} {answer}')}"
        for answer in entry.approvals
        if answer.question.stage == stage
    ]


def _gates(entry: RunEntry, name: str) -> list[str]:
    of = stage_and_measurements(entry, name)
    gates = [f"- {each.name}: {markdown_text(str(verdict))}" for each in of for verdict in each.verdicts]
    gates += [f"- {each.name}: loosened: {markdown_text(str(gate))}" for each in of for gate in each.loosened]
    return gates + [line for each in of for line in answers(entry, each.name)]


def _measured(entry: RunEntry, name: str) -> list[str]:
    """Return estimates over held-out prompts with their intervals; without any, the plain numbers. Of a family, only the first is returned."""
    rows = []
    for of in stage_and_measurements(entry, name):
        for metric in _worth_showing(of.artifact):
            assert of.artifact is not None, "it has metrics"
            value, known = of.artifact.metrics[metric], of.artifact.uncertainty.get(metric)
            assert value is not None, "chosen by this"
            interval = interval_among(
                metric, of.artifact.metrics, of.artifact.uncertainty, confidence=DEFAULT_CONFIDENCE
            )
            shown = f"{interval[0]:.4g} to {interval[1]:.4g}" if interval else "–"
            prompts = f"{known.n:,}" if known else "–"
            rows.append(f"| {markdown_text(of.name)} | {metric} | {value:.4g} | {shown} | {prompts} |")
    if not rows:
        return []
    more = len(rows) - _MOST_ROWS
    cut = [f"| … | {more} more: the pages of the stages' runs | | | |"] if more > 0 else []
    head = ["| by | metric | value | 95 % interval | prompts |", "|---|---|---|---|---|"]
    return [*head, *rows[:_MOST_ROWS], *cut]


def _worth_showing(artifact: Artifact | None) -> list[str]:
    if artifact is None:
        return []
    known = [metric for metric, value in artifact.metrics.items() if value is not None]
    estimates = [metric for metric in known if metric in artifact.uncertainty]
    seen, shown = set[str](), []
    for metric in estimates or known:
        family = _FAMILIES.get(metric, metric)
        if family not in seen:
            shown.append(metric)
        seen.add(family)
    return shown


def _limits(entry: RunEntry, name: str) -> list[str]:
    """Return the limits of the numbers: what was closed, left out or warned of, and what was not measured."""
    stage, of = entry.stages[name], stage_and_measurements(entry, name)
    lines = list(_trained_limits(entry, name))
    evaluations = [each.name for each in of if each is not stage]
    if evaluations:
        lines.append(
            f"Measured on this recipe's held-out prompts alone, by {', '.join(map(markdown_text, evaluations))}; nothing is "
            "known of other prompts or languages, of safety, or of bias, unless these prompts are about them."
        )
    else:
        lines.append(
            "No evaluation of this run measured it: nothing is known of it beyond what its own stage measured."
        )
    for each in [*of, *(entry.stages[before] for before in ancestors(entry, name))]:
        lines += [f"{each.name}: the gate was loosened: {gate}" for gate in each.loosened]
        closed = [verdict for verdict in each.verdicts if not verdict.passed]
        unsure = [verdict for verdict in each.verdicts if verdict.passed and verdict.warning]
        lines += [f"{each.name}: the gate is closed: {verdict}" for verdict in closed]
        lines += [f"{each.name}: {verdict.metric}: {verdict.warning}" for verdict in unsure]
        if each.artifact is None:
            continue
        lines += [f"{each.name}: {warning}" for warning in warnings_about(each.artifact)]
        if left_out := dropped_summary(each.artifact.metrics):
            lines.append(f"{each.name}: left out: {left_out}")
    return [f"- {markdown_text(line)}" for line in dict.fromkeys(lines)]


def _trained_limits(entry: RunEntry, name: str) -> Iterator[str]:
    generation = entry.generation
    if entry.stages[name].kind not in MODEL_IMPORTS and "max_prompt_tokens" in generation:
        yield (
            f"Trained on prompts of at most {generation['max_prompt_tokens']} tokens and responses of at most "
            f"{generation.get('max_response_tokens')}, sampled at temperature {generation.get('temperature')}."
        )


def _data(entry: RunEntry, name: str, producers: Mapping[ArtifactKey, Link]) -> list[str]:
    """Return every dataset and imported model among the inputs, with source, digest and licence."""
    rows = []
    for step in (*ancestors(entry, name), *([name] if entry.stages[name].kind in MODEL_IMPORTS else ())):
        stage = entry.stages[step]
        if stage.artifact is None or stage.kind not in ("prepare_data", *MODEL_IMPORTS):
            continue
        page = producers.get(artifact_key(stage.artifact), Link()).run
        counts = [stage.artifact.metrics.get(split) for split in _SPLITS]
        shown = " + ".join(f"{count:,.0f}" for count in counts if count is not None) or "–"
        of = f" (sha256 `{stage.source_sha256[:16]}`)" if stage.source_sha256 else ""
        cells = (
            linked(step, page),
            f"{_source(stage)}{of}",
            shown,
            f"`{stage.artifact.digest[:16]}`",
            licence_of(entry, step),
        )
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    head = [
        "| what | source | rows for training + validation + test | content digest | licence |",
        "|---|---|---|---|---|",
    ]
    return [*head, *rows]


def _source(stage: StageEntry) -> str:
    return markdown_text(without_secrets(stage.source)) if stage.source else "unknown"


def licence_of(entry: RunEntry, step: str) -> str:
    """Return the licence that the recipe names (``licenses``), ours for what Vantage itself generates, or that none is recorded."""
    if named := entry.licenses.get(step):
        return markdown_text(named)
    stage = entry.stages.get(step)
    is_ours = (
        stage is not None and stage.source is not None and isinstance(model_source(stage.source), Builtin)
    )
    return f"{_OUR_LICENCE} (part of Vantage)" if is_ours else NO_LICENCE


def _licence(entry: RunEntry, name: str) -> list[str]:
    if named := entry.licenses.get(name):
        return [f"{markdown_text(named)}, as the recipe says."]
    sources = [
        step for step in ancestors(entry, name) if entry.stages[step].kind in ("prepare_data", *MODEL_IMPORTS)
    ]
    unknown = [step for step in sources if licence_of(entry, step) == NO_LICENCE]
    said = "The recipe names none for this model (`licenses`); what its base model and its data allow holds for it too."
    if unknown:
        said += f" Not recorded of: {', '.join(map(markdown_text, unknown))}."
    return [said]


def parents_table(stage: StageEntry, producers: Mapping[ArtifactKey, Link]) -> list[str]:
    """Return the stage's inputs, with links to the runs that made them."""
    parents = {} if stage.artifact is None else stage.artifact.parents
    if not stage.inputs and SOURCE not in parents:
        return []
    lines = ["| role | kind | made by | content digest |", "|---|---|---|---|"]
    for role, given in stage.inputs.items():
        link = producers.get(artifact_key(given.artifact), Link())
        made_by = linked_run(link) if link.run else markdown_text(given.stage)
        kind = linked(words(given.artifact.kind), link.model)
        lines.append(f"| {role} | {kind} | {made_by} | `{given.artifact.digest[:16]}` |")
    kinds = {PREVIOUS: stage.artifact.kind, PREVIOUS_STATE: STATE_KIND} if stage.artifact is not None else {}
    lines += [
        f"| {role} | {words(kind)} | the shorter stage that it goes on from | `{parents[role][:16]}` |"
        for role, kind in kinds.items()
        if role in parents
    ]
    if SOURCE in parents and stage.source is not None and stage.artifact is not None:
        made_by = markdown_text(stage.source.partition("#")[0])
        lines.append(f"| {SOURCE} | {words(stage.artifact.kind)} | {made_by} | `{parents[SOURCE][:16]}` |")
    return lines


def in_markdown(sections: Mapping[str, Sequence[str]], *, level: int) -> list[str]:
    """Return lines of all sections, each under its title."""
    return [line for title, lines in sections.items() for line in ("", f"{'#' * level} {title}", "", *lines)]
