"""A gate's judgement as a value that carries its evidence."""

import math
from collections.abc import Mapping

from schemas.frozen import Frozen
from schemas.recipe.stages import Gate
from schemas.records.artifacts import StoredArtifact
from schemas.records.uncertainty import COMPARISONS, Uncertainty, interval_of

Metrics = Mapping[str, float | None]

DEFAULT_CONFIDENCE = 0.95
"""Of the interval that stands in a verdict whose gate asked for none."""


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
    n: int | None = None
    """Independent prompts behind the measured number; None where it is no estimate."""
    standard_error: float | None = None
    interval: tuple[float, float] | None = None
    """Two-sided, at ``confidence``, or at 95 % where the gate asked for none."""
    confidence: float | None = None
    """What the gate asked for: then a bound of the interval was judged, else the measured number."""
    reason: str | None = None
    """Why the gate is closed whatever was measured."""
    warning: str | None = None
    """Why the verdict says little."""

    def __str__(self) -> str:
        measured = "undefined" if self.measured is None else _decimal(self.measured, self.threshold)
        if self.interval is not None:
            decimals = _decimals(self.interval)
            low, high = (_decimal(bound, self.threshold, decimals=decimals) for bound in self.interval)
            measured += f" [{low}, {high}]"
        if self.n is not None:
            measured += f" n={self.n:,}"
        threshold = f"{self.relation} {self.threshold:g}"
        if self.confidence is not None:
            threshold += f" at {_percent(self.confidence)}"
        outcome = "passed" if self.passed else "CLOSED"
        because = "; ".join(each for each in (self.reason, self.warning) if each)
        return f"{self.metric} {measured} {threshold}: {outcome}{f' ({because})' if because else ''}"


def _decimal(measured: float, threshold: float, *, decimals: int = 3) -> str:
    """So many decimals, or as many as show on which side of the threshold it lies: 0.74996 is no 0.750."""
    for enough in range(decimals, 17):
        text = f"{measured:.{enough}f}"
        above, below = float(text) > threshold, float(text) < threshold
        if (above, below) == (measured > threshold, measured < threshold):
            return text
    return repr(measured)


def _decimals(interval: tuple[float, float]) -> int:
    """Two, or as many as show a digit of the interval's width."""
    width = interval[1] - interval[0]
    return min(max(2, -math.floor(math.log10(width))), 8) if width > 0 else 2


def _percent(confidence: float) -> str:
    return f"{100 * confidence:g} %"


def check_gate(
    gate: Gate,
    metrics: Metrics,
    uncertainty: Mapping[str, Uncertainty] | None = None,
    *,
    equal: str | None = None,
) -> Verdict:
    """Judge measured metrics; pure, and closed for whatever is undefined or not finite.

    With ``gate.confidence`` the bound of the two-sided interval is judged, so that what is printed is what was
    judged: where the true value lies at the threshold, the gate opens by chance in half of the remaining share, 2.5 %
    at 0.95.

    Args:
        uncertainty: metric → how sure it is.
        equal: how it is known that the two models which the metrics compare are one; None where they are two. Their
            difference is 0 by construction, which is no measurement: the gate is closed.

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
    measured, metric_uncertainty = evidence[gate.metric], (uncertainty or {}).get(gate.metric)
    confidence = DEFAULT_CONFIDENCE if gate.confidence is None else gate.confidence
    interval = None
    if measured is not None and metric_uncertainty is not None:
        interval = interval_of(gate.metric, measured, metric_uncertainty, confidence=confidence)
    judged = (measured, measured) if gate.confidence is None else interval or (None, None)
    reason = equal if gate.metric in COMPARISONS else None
    warning = None
    if (
        measured is not None
        and reason is None
        and (metric_uncertainty is not None or gate.confidence is not None)
    ):
        warning = _warning(gate.bound, interval, metric_uncertainty, confidence)
    return Verdict(
        passed=reason is None and _meets(gate, *judged),
        metric=gate.metric,
        measured=measured,
        relation=gate.relation,
        threshold=gate.bound,
        on_fail=gate.on_fail,
        evidence=evidence,
        n=metric_uncertainty.n if metric_uncertainty else None,
        standard_error=metric_uncertainty.standard_error if metric_uncertainty else None,
        interval=interval,
        confidence=gate.confidence,
        reason=reason,
        warning=warning,
    )


def check_artifact_gate(gate: Gate, artifact: StoredArtifact, *, equal: str | None = None) -> Verdict:
    """Judge what an artifact says was measured of it; see ``judge``."""
    return check_gate(gate, artifact.metrics, artifact.uncertainty, equal=equal)


def _meets(gate: Gate, low: float | None, high: float | None) -> bool:
    """Whether what is judged, from ``low`` to ``high``, meets the gate's bound; never where it is undefined."""
    if low is None or high is None:
        return False
    return (gate.at_least is None or low >= gate.at_least) and (gate.at_most is None or high <= gate.at_most)


def _warning(
    threshold: float,
    interval: tuple[float, float] | None,
    metric_uncertainty: Uncertainty | None,
    confidence: float,
) -> str | None:
    """Why the measured number does not tell on which side of the threshold the true one lies."""
    if interval is None:
        few = metric_uncertainty is None or metric_uncertainty.n < 2
        return (
            f"too few to tell: {'one prompt has' if few else 'prompts that do not differ have'} no interval"
        )
    if interval[0] <= threshold <= interval[1]:
        return f"too few to tell: the {_percent(confidence)} interval contains {threshold:g}"
    return None
