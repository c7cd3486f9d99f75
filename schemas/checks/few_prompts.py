"""Gates that are judged on so few held-out prompts that they will tell little, said before anything runs.

The rule. A gate on a share: n prompts can tell a share from the threshold only from a certain one on, the lowest whose
interval lies beyond the threshold; where that is more than 0.1 away, or does not exist, the gate is warned of. A gate on
any other estimate: fewer than 30 prompts, from which its standard error is itself uncertain by more than 13 %
(1/√(2(n − 1))).
"""

from collections.abc import Iterator, Mapping

from schemas.kinds import KINDS
from schemas.recipe.recipe import Recipe
from schemas.recipe.stages import Gate, Stage
from schemas.records.metrics import estimated_by
from schemas.records.uncertainty import SHARES, smallest_telling_share
from schemas.records.verdicts import SHOWN_CONFIDENCE
from schemas.steps import dependencies

MARGIN = 0.1
"""How far from the threshold a share may lie at most before a gate tells the two apart."""
ENOUGH = 30
"""Prompts from which a standard error is known well enough."""

Measured = Mapping[str, Mapping[str, float | None]]
"""Step that makes a dataset → its headline metrics, of datasets that are there already."""


def few_prompts(recipe: Recipe, measured: Measured) -> Iterator[str]:
    """A sentence for each gate that n prompts tell little of, where n is known: from ``split``, or from the dataset."""
    inputs = dependencies(recipe)
    for name, stage in recipe.stages.items():
        for gate in stage.gate:
            if gate.metric not in estimated_by(stage.kind):
                continue
            step = _held_out_of(stage, inputs[name])
            n = _prompts(recipe, stage, step, measured)
            why = None if n is None else _tells_little(gate, n)
            if why:
                remedy = f"; set more apart in {step}.split.test" if step.startswith("data.") else ""
                yield f"stages.{name}.gate: {gate.metric} is measured on {n:,} prompts at most, {why}{remedy}"


def _tells_little(gate: Gate, n: int) -> str | None:
    if gate.metric not in SHARES:
        return f"too few to know its standard error (from {ENOUGH} on)" if n < ENOUGH else None
    confidence = gate.confidence or SHOWN_CONFIDENCE
    # A share that may be at most t is wrong ones that must be at least 1 − t.
    threshold = gate.bound if gate.at_least is not None else 1 - gate.bound
    if not 0 <= threshold <= 1:
        return None
    telling = smallest_telling_share(threshold, n, confidence=confidence)
    if telling is None:
        return f"of which not even a perfect result tells it from {gate.bound:g}"
    if telling - threshold <= MARGIN:
        return None
    beyond = f"{telling:.3g} up" if gate.at_least is not None else f"{1 - telling:.3g} down"
    return f"which tell it from {gate.bound:g} only from {beyond}"


def _held_out_of(stage: Stage, inputs: Mapping[str, str]) -> str:
    """The step that makes the dataset on whose held-out prompts the stage is measured."""
    fields = [field for field in KINDS[stage.kind].data if field in ("data", "rankings", "prompts")]
    return next(inputs[field] for field in fields if field in inputs)


def _prompts(recipe: Recipe, stage: Stage, step: str, measured: Measured) -> int | None:
    """How many test prompts at most the stage is measured on; None where nobody knows yet."""
    known: list[int] = []
    rows = measured.get(step, {}).get("test_rows")
    asked = recipe.data[step.removeprefix("data.")].split.test if step.startswith("data.") else None
    if rows is not None:
        known.append(int(rows))
    elif isinstance(asked, int):
        known.append(asked)
    samples = getattr(stage, "test_samples", None) or getattr(stage, "validation_samples", None)
    known += [samples] if samples is not None else []
    return min(known, default=None)
