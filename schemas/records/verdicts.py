"""The verdict of a gate, with its evidence."""

import math
from collections.abc import Mapping

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.artifacts import StoredArtifact
from vantage.schemas.records.uncertainty import COMPARISONS, Uncertainty, interval_of

Metrics = Mapping[str, float | None]

DEFAULT_CONFIDENCE = 0.95
"""Confidence of a verdict's interval if the gate sets none."""


class Verdict(Frozen):
    """The result of a gate on a stage's metrics."""

    passed: bool
    metric: str
    measured: float | None
    """None if the metric is undefined (for example explained variance of constant returns)."""
    relation: str
    threshold: float
    on_fail: str
    evidence: dict[str, float | None]
    """All headline metrics of the stage."""
    n: int | None = None
    """Number of independent prompts; None if the metric is no estimate."""
    standard_error: float | None = None
    interval: tuple[float, float] | None = None
    """Two-sided, at ``confidence``, or at 95 % if the gate sets none."""
    confidence: float | None = None
    """The gate's: if set, a bound of the interval was compared, else the measured number."""
    reason: str | None = None
    """Why the gate is closed, whatever the measured number."""
    warning: str | None = None
    """Why the verdict is not conclusive."""

    @property
    def judged(self) -> float | None:
        """What is compared with the threshold: with a confidence a bound of the interval, else the measured number; None if
        there is none, or if the gate is closed whatever it is."""
        if self.reason is not None:
            return None
        if self.confidence is None:
            return self.measured
        return None if self.interval is None else self.interval[0 if self.relation == ">=" else 1]

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
    """Write the number with ``decimals`` digits, or with as many as show the side of the threshold: 0.74996 is not 0.750."""
    for enough in range(decimals, 17):
        text = f"{measured:.{enough}f}"
        above, below = float(text) > threshold, float(text) < threshold
        if (above, below) == (measured > threshold, measured < threshold):
            return text
    return repr(measured)


def _decimals(interval: tuple[float, float]) -> int:
    """Return two, or as many as show one digit of the interval's width."""
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
    """Check a gate; pure. Undefined and not finite metrics close it.

    With ``gate.confidence``, a bound of the two-sided interval is compared. If the true value is at the threshold, the
    gate then passes by chance in half of the remaining share: 2.5 % at 0.95.

    Args:
        uncertainty: metric → its uncertainty.
        equal: the reason why both compared models are the same; None if they differ. The difference of equal models is
            0 by construction, so the gate is closed.

    Raises:
        ValueError: the stage did not measure the gate's metric at all.
    """
    if gate.metric not in metrics:
        raise ValueError(
            f"gate.metric={gate.metric!r} was not measured; measured: {', '.join(sorted(metrics))}"
        )
    # JSON has neither NaN nor infinity, and neither passes a gate.
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
    """Judge a gate as ``check_gate`` does, on the metrics of an artifact."""
    return check_gate(gate, artifact.metrics, artifact.uncertainty, equal=equal)


def _meets(gate: Gate, low: float | None, high: float | None) -> bool:
    """Return whether the range from ``low`` to ``high`` meets the gate's bound; an undefined range does not."""
    if low is None or high is None:
        return False
    return (gate.at_least is None or low >= gate.at_least) and (gate.at_most is None or high <= gate.at_most)


def _warning(
    threshold: float,
    interval: tuple[float, float] | None,
    metric_uncertainty: Uncertainty | None,
    confidence: float,
) -> str | None:
    """Return why it is not clear on which side of the threshold the true value lies; None if it is."""
    if interval is None:
        few = metric_uncertainty is None or metric_uncertainty.n < 2
        return (
            f"too few to tell: {'one prompt has' if few else 'prompts that do not differ have'} no interval"
        )
    if interval[0] <= threshold <= interval[1]:
        return f"too few to tell: the {_percent(confidence)} interval contains {threshold:g}"
    return None
