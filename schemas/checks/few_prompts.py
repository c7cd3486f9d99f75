"""Warnings about gates with too few held-out prompts, given before anything runs.

For a gate on a share, there is a lowest share of n prompts whose interval lies above the threshold. A warning is given
if that share is more than 0.1 above the threshold, or does not exist. For a gate on any other estimate, a warning is
given below 30 prompts: its standard error is then itself uncertain by more than 13 % (1/√(2(n − 1))).
"""

from collections.abc import Iterator, Mapping

from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Gate, Stage
from vantage.schemas.records.metrics import METRICS, estimated_metric_names
from vantage.schemas.records.uncertainty import SHARES, smallest_conclusive_share
from vantage.schemas.records.verdicts import DEFAULT_CONFIDENCE
from vantage.schemas.splits import asked_test_rows
from vantage.schemas.steps import Inputs

MARGIN = 0.1
"""Largest allowed distance between the threshold and the lowest share that the gate can distinguish from it."""
ENOUGH_PROMPTS = 30
"""Smallest number of prompts for which the standard error is known well enough."""

_ON_DEMONSTRATIONS = frozenset(metric.name for metric in METRICS if "demonstrations" in metric.needs)

Measured = Mapping[str, Mapping[str, float | None]]
"""Step that makes a dataset → its headline metrics, for datasets that exist already."""


def few_prompts(recipe: Recipe, inputs: Inputs, measured: Measured) -> Iterator[str]:
    """Yield a warning for each gate with too few prompts, if their number is known from ``split`` or the dataset.

    ``inputs``: step → role → step that it reads, as ``dependencies`` returns it.
    """
    for name, stage in recipe.stages.items():
        for gate in stage.gate:
            if gate.metric not in estimated_metric_names(stage.kind) or KINDS[stage.kind].benchmarks:
                continue  # only a task's files show how many examples it has
            step = _held_out_of(name, stage, inputs, gate.metric)
            asked = asked_test_rows(recipe.data, recipe.mixtures, step.partition(".")[2])
            n = _prompts(stage, asked=asked, rows=measured.get(step, {}).get("test_rows"))
            why = None if n is None else _why_inconclusive(gate, n)
            if why:
                remedy = f"; set more apart in {step}.split.test" if "." in step else ""
                yield f"stages.{name}.gate: {gate.metric} is measured on {n:,} prompts at most, {why}{remedy}"


def _why_inconclusive(gate: Gate, n: int) -> str | None:
    if gate.metric not in SHARES:
        return (
            f"too few to know its standard error (from {ENOUGH_PROMPTS} on)" if n < ENOUGH_PROMPTS else None
        )
    confidence = gate.confidence or DEFAULT_CONFIDENCE
    # "At most t right" is the same as "at least 1 − t wrong".
    threshold = gate.bound if gate.at_least is not None else 1 - gate.bound
    if not 0 <= threshold <= 1:
        return None
    smallest = smallest_conclusive_share(threshold, n, confidence=confidence)
    if smallest is None:
        return f"of which not even a perfect result tells it from {gate.bound:g}"
    if smallest - threshold <= MARGIN:
        return None
    beyond = f"{smallest:.3g} up" if gate.at_least is not None else f"{1 - smallest:.3g} down"
    return f"which tell it from {gate.bound:g} only from {beyond}"


def _held_out_of(name: str, stage: Stage, inputs: Inputs, metric: str) -> str:
    """Return the step that makes the dataset whose held-out prompts the metric is measured on (of collected responses: their prompts)."""
    read = inputs[name]
    if metric in _ON_DEMONSTRATIONS and "demonstrations" in read:
        return read["demonstrations"]
    fields = [field for field in KINDS[stage.kind].data if field in ("data", "rankings", "prompts")]
    named = next((read[field] for field in fields if field in read), None)
    return inputs[read["rollouts"]]["prompts"] if named is None else named


def _prompts(stage: Stage, *, asked: int | float | str | None, rows: float | None) -> int | None:
    """Return an upper bound on the test prompts that the stage is measured on; None if it is not known yet.

    Args:
        asked: the recipe's setting for the test rows of the prompts' dataset.
        rows: test rows that the dataset has, if it exists already.
    """
    known: list[int] = []
    if rows is not None:
        known.append(int(rows))
    elif isinstance(asked, int):
        known.append(asked)
    samples = getattr(stage, "test_samples", None) or getattr(stage, "validation_samples", None)
    known += [samples] if samples is not None else []
    return min(known, default=None)
