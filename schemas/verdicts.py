"""A gate's judgement as a value that carries its evidence."""

from collections.abc import Mapping

from schemas.frozen import Frozen
from schemas.recipe import Gate

Metrics = Mapping[str, float | None]


class Verdict(Frozen):
    """What a gate said of a stage's measured metrics."""

    passed: bool
    metric: str
    measured: float | None
    """None where the metric is undefined (for example explained variance of constant returns)."""
    relation: str
    threshold: float
    on_fail: str
    evidence: dict[str, float | None]
    """The metrics that stood beside the measured one when the gate was judged."""

    def __str__(self) -> str:
        measured = "undefined" if self.measured is None else f"{self.measured:.3f}"
        return f"{self.metric} {measured} {self.relation} {self.threshold:g}: {'passed' if self.passed else 'CLOSED'}"


def judge(gate: Gate, metrics: Metrics) -> Verdict:
    """Judge measured metrics; pure, and closed for whatever is missing, undefined or NaN.

    Raises:
        ValueError: the stage did not measure the gate's metric at all.
    """
    if gate.metric not in metrics:
        raise ValueError(f"gate.metric={gate.metric!r} was not measured; measured: {', '.join(sorted(metrics))}")
    measured = metrics[gate.metric]
    if measured is None:
        passed = False
    elif gate.at_least is not None:
        passed = measured >= gate.at_least
    else:
        passed = measured <= gate.bound
    return Verdict(
        passed=passed,
        metric=gate.metric,
        measured=measured if measured == measured else None,
        relation=gate.relation,
        threshold=gate.bound,
        on_fail=gate.on_fail,
        evidence=dict(metrics),
    )
