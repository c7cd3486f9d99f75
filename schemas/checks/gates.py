"""Check the metrics that gates ask for."""

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
    """Yield problems of gates whose metric is not measured, was selected on, or lacks the required standard error."""
    for stage in recipe.stages.values():
        if stage.kind is not None:
            for gate in stage.gates:
                yield from _gate_problems(gate, stage.kind.name, stage.settings)


def _gate_problems(gate: PartialGate, kind: str, has: Settings | None) -> Iterator[Problem]:
    metric, shown = gate.metric, quote(gate.metric)
    measured, usable = headline_metric_names(kind, has=has), gate_metric_names(kind, has=has)
    if metric in measured and metric.startswith(SELECTION_PREFIX):
        message = f"{shown} is measured on what chose the best, so that it is optimistic"
        remedy = f"use one of: {', '.join(one_of_each_family(usable))}"
        yield Problem((*gate.path, "metric"), message, remedy)
    elif metric in measured:
        estimated = estimated_metric_names(kind, has=has) & usable
        if gate.has_confidence and metric not in estimated:
            one_of = "one of: " if len(estimated) > 1 else ""
            others = f", or gate on {one_of}{', '.join(one_of_each_family(estimated))}" if estimated else ""
            message = f"{shown} comes without a standard error, so no confidence can be asked of it"
            yield Problem((*gate.path, "confidence"), message, f"remove confidence{others}")
    else:
        has = has or ()
        listed = one_of_each_family(measured)
        needed = (
            f"{how_to_measure(metric, has)}, or " if has and metric in headline_metric_names(kind) else ""
        )
        judges = [judge for judge in JUDGED if judge in has and f"also.{judge}" not in has]
        by = with_article(kind) + "".join(f" with a {judge} as judge" for judge in judges)
        remedy = f"{needed}{suggest(metric, sorted(measured), listed=listed)}"
        yield Problem((*gate.path, "metric"), f"{by} does not measure {shown}", remedy)
