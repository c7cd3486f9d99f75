"""Checks of the metrics that gates ask for."""

from collections.abc import Iterator

from vantage.schemas.checks.partial_recipe import PartialGate, PartialRecipe
from vantage.schemas.checks.references import with_article
from vantage.schemas.metric_names import JUDGED
from vantage.schemas.problems import Problem, quote, suggest
from vantage.schemas.records.metric import Settings
from vantage.schemas.records.metrics import (
    SELECTION_PREFIX,
    estimated_metric_names,
    gate_metric_names,
    headline_metric_names,
    how_to_measure,
    one_of_each_family,
)


def gate_problems(recipe: PartialRecipe) -> Iterator[Problem]:
    """Gates on a metric that is not measured, was selected on, or comes without the standard error that is asked for."""
    for stage in recipe.stages.values():
        if stage.kind is None:
            continue
        for gate in stage.gates:
            kind, has = stage.kind.name, stage.settings
            measured = headline_metric_names(kind, has=has)
            if gate.metric.startswith(SELECTION_PREFIX) and gate.metric in measured:
                yield _optimistic(gate, kind, has)
            elif gate.metric not in measured:
                yield _unmeasured(gate, kind, has or (), sorted(measured))
            elif gate.has_confidence:
                yield from _confidence_without_estimate(gate, kind, has)


def _optimistic(gate: PartialGate, kind: str, has: Settings | None) -> Problem:
    """A gate on a metric of the data that selects checkpoints."""
    message = f"{quote(gate.metric)} is measured on what chose the best, so that it is optimistic"
    others = one_of_each_family(gate_metric_names(kind, has=has))
    return Problem((*gate.path, "metric"), message, f"use one of: {', '.join(others)}")


def _unmeasured(gate: PartialGate, kind: str, has: Settings, measured: list[str]) -> Problem:
    """A gate on a metric that the kind of stage does not report, or not with the stage's settings."""
    judges = [judge for judge in JUDGED if judge in has and f"also.{judge}" not in has]
    by = with_article(kind) + "".join(f" with a {judge} as judge" for judge in judges)
    instead = suggest(gate.metric, measured, listed=one_of_each_family(measured))
    if has and gate.metric in headline_metric_names(kind):
        instead = f"{how_to_measure(gate.metric, has)}, or {instead}"
    return Problem((*gate.path, "metric"), f"{by} does not measure {quote(gate.metric)}", instead)


def _confidence_without_estimate(gate: PartialGate, kind: str, has: Settings | None) -> Iterator[Problem]:
    """A gate with ``confidence`` on a metric that has no standard error."""
    estimated = estimated_metric_names(kind, has=has) & gate_metric_names(kind, has=has)
    if gate.metric not in estimated:
        one_of = "one of: " if len(estimated) > 1 else ""
        others = f", or gate on {one_of}{', '.join(one_of_each_family(estimated))}" if estimated else ""
        message = f"{quote(gate.metric)} comes without a standard error, so no confidence can be asked of it"
        yield Problem((*gate.path, "confidence"), message, f"remove confidence{others}")
