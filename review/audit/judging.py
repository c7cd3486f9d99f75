"""Judge verdicts again, from the artifacts' sealed files."""

import math
from collections.abc import Iterator, Mapping, Sequence

from vantage.attempts.jobs import gates_of
from vantage.ledger.operations import Input
from vantage.ledger.remarks import compared_with_itself
from vantage.review.audit.evidence import Evidence, check_of
from vantage.runs.view import Broken, Missing
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.artifacts import is_same
from vantage.schemas.records.audit import Check, Outcome
from vantage.schemas.records.verdicts import Verdict, check_gate, recorded_verdict

_EXACT = (
    *("passed", "metric", "measured", "relation", "threshold", "on_fail", "evidence", "n", "confidence"),
    "method",
)
_ROUNDED = ("standard_error", "interval", "counts")
"""Fields computed by the machine that judged: another machine's last bits may differ."""


def judge_again(
    evidence: Evidence,
    recipe: ResolvedRecipe,
    step: str,
    digest: str,
    inputs: Mapping[str, Input],
    *,
    recorded: Sequence[Verdict],
) -> list[Verdict] | Missing | Broken:
    """Return the verdicts of a step's gates, from the metrics in the artifact's own files.

    Args:
        inputs: role → what the step read, to see whether it compared a model with itself.
        recorded: the verdicts as recorded; each gate is judged by its verdict's interval method.
    """
    sealed = evidence.sealed(digest)
    if isinstance(sealed, Missing | Broken):
        return sealed
    measured, equal = sealed.measured, compared_with_itself(inputs)
    gates = gates_of(recipe, step)
    if absent := [gate.metric for gate in gates if gate.metric not in measured.metrics]:
        return Broken(f"the artifact holds no {', '.join(absent)}, which a gate asks for")
    return [
        check_gate(
            gate,
            measured.metrics,
            measured.uncertainty,
            equal=equal,
            like=recorded_verdict(recorded, place, gate),
        )
        for place, gate in enumerate(gates)
    ]


def gate_checks(
    recorded: Sequence[Verdict], judged: list[Verdict] | Missing | Broken, *, by: str
) -> Iterator[Check]:
    """Yield one check for each gate; ``by``: who recorded the verdicts, for the message."""
    if isinstance(judged, Missing | Broken):
        yield check_of("gates", judged)
        return
    if len(recorded) != len(judged):
        said = f"{by} has {len(recorded)} verdicts, the recipe has {len(judged)} gates"
        yield Check(subject="gates", outcome="wrong", detail=said)
        return
    for claimed, again in zip(recorded, judged, strict=True):
        subject = f"gate {again.metric}"
        if differs(claimed, again):
            said = f"{by} says “{claimed}”, judged again it is “{again}”{_hidden_difference(claimed, again)}"
            yield Check(subject=subject, outcome="wrong", detail=said)
        else:
            outcome: Outcome = "ok" if again.passed else "note"
            yield Check(subject=subject, outcome=outcome, detail=str(again).removeprefix(f"{again.metric} "))


def is_unchanged(evidence: Evidence, one: Input | None, other: Input | None) -> bool:
    """Return whether two inputs have the same sealed files."""
    if one is None or other is None:
        return False
    sealed = [evidence.sealed(each.artifact.digest) for each in (one, other)]
    first, second = (None if isinstance(each, Missing | Broken) else each.files_digest for each in sealed)
    return (first is not None and first == second) or is_same(one.artifact, other.artifact)


def differs(claimed: Verdict, again: Verdict) -> bool:
    """Return whether two verdicts differ by more than rounding."""
    return any(getattr(claimed, field) != getattr(again, field) for field in _EXACT) or any(
        not is_close(getattr(claimed, field), getattr(again, field)) for field in _ROUNDED
    )


def is_close(one: object, other: object) -> bool:
    """Return whether two numbers, or two tuples or mappings of numbers, differ only by rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[name], other[name]) for name in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return one == other


def _hidden_difference(claimed: Verdict, again: Verdict) -> str:
    """Return the differing fields of two verdicts whose texts are equal."""
    if str(claimed) != str(again):
        return ""
    fields = [
        field
        for field in (*_EXACT, *_ROUNDED)
        if not is_close(getattr(claimed, field), getattr(again, field))
    ]
    return f" ({', '.join(fields)} differ)"
