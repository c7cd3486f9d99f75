"""A gate's judgement as a value that carries its evidence."""

import math
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
        measured = "undefined" if self.measured is None else _shown(self.measured, self.threshold)
        outcome = "passed" if self.passed else "CLOSED"
        return f"{self.metric} {measured} {self.relation} {self.threshold:g}: {outcome}"


def _shown(measured: float, threshold: float) -> str:
    """Three decimals, or as many as show on which side of the threshold it lies: 0.74996 is no 0.750."""
    for decimals in range(3, 17):
        text = f"{measured:.{decimals}f}"
        above, below = float(text) > threshold, float(text) < threshold
        if (above, below) == (measured > threshold, measured < threshold):
            return text
    return repr(measured)


def judge(gate: Gate, metrics: Metrics) -> Verdict:
    """Judge measured metrics; pure, and closed for whatever is undefined or not finite.

    Raises:
        ValueError: the stage did not measure the gate's metric at all.
    """
    if gate.metric not in metrics:
        raise ValueError(
            f"gate.metric={gate.metric!r} was not measured; measured: {', '.join(sorted(metrics))}"
        )
    # JSON has neither NaN nor infinity, and a gate opens for neither.
    evidence = {
        name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()
    }
    measured = evidence[gate.metric]
    passed = (
        measured is not None
        and (gate.at_least is None or measured >= gate.at_least)
        and (gate.at_most is None or measured <= gate.at_most)
    )
    return Verdict(
        passed=passed,
        metric=gate.metric,
        measured=measured,
        relation=gate.relation,
        threshold=gate.bound,
        on_fail=gate.on_fail,
        evidence=evidence,
    )
