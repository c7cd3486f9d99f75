"""The verdict of a gate, with its evidence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.metric_names import LEAD_SHARE
from vantage.schemas.recipe.fields import is_unset
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.artifacts import StoredArtifact
from vantage.schemas.records.earlier_intervals import earlier_interval_of
from vantage.schemas.records.uncertainty import (
    COMPARISONS,
    MIN_CARRYING_PROMPTS,
    IntervalMethod,
    Uncertainty,
    carried,
    decimals_of,
    gate_interval_of_share,
    interval_among,
    method_of,
)

Metrics = Mapping[str, float | None]

DEFAULT_CONFIDENCE = 0.95
"""Confidence of a verdict's interval if the gate sets none."""

NO_LEAD = "the teacher scores no higher than the student before training, so it has no lead to share"
"""Reason of a closed gate on the share of a teacher's lead."""
STOPS = ("stop", "extend")
"""``on_fail`` of gates that stop the run when they are closed; ``extend`` does so after its last extension."""


class Verdict(Frozen):
    """The result of a gate on a stage's metrics."""

    passed: bool
    metric: str
    measured: float | None
    """The metric's value; None if it is undefined (for example explained variance of constant returns)."""
    relation: str
    threshold: float
    on_fail: str
    evidence: dict[str, float | None]
    """All headline metrics of the stage."""
    n: int | None = None
    """Number of independent prompts; None if the metric is not an estimate."""
    standard_error: float | None = None
    interval: tuple[float, float] | None = None
    """Two-sided interval, at ``confidence``, or at 95 % if the gate sets none."""
    method: IntervalMethod | None = Field(None, exclude_if=is_unset)
    """Method of the interval. None: the metric is not an estimate, or an earlier version judged (``earlier_intervals``)."""
    counts: dict[str, float] = Field(default_factory=dict, exclude_if=is_unset)
    """Counts that the method reads beside ``n``, ``measured`` and ``standard_error``: ``rows``; of a comparison of shares
    ``differing_rows``; for prompts of unequal size ``equal_prompts``; of a ratio of squares ``carrying_prompts``."""
    confidence: float | None = None
    """The gate's confidence: if set, a bound of the interval was compared, else the measured number."""
    reason: str | None = None
    """Reason why the gate is closed, whatever the measured number."""
    warning: str | None = None
    """Reason why the verdict is not conclusive."""

    @property
    def judged(self) -> float | None:
        """Return the number that is compared with the threshold: with a confidence a bound of the interval, else the
        measured number; None if there is none, or if the gate is closed whatever the number is."""
        if self.reason is not None:
            return None
        if self.confidence is None:
            return self.measured
        return None if self.interval is None else self.interval[0 if self.relation == ">=" else 1]

    def __str__(self) -> str:
        measured = "undefined" if self.measured is None else _decimal(self.measured, self.threshold)
        if self.interval is not None:
            decimals = decimals_of(self.interval)
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


def _percent(confidence: float) -> str:
    return f"{100 * confidence:g} %"


@dataclass(frozen=True)
class _Judged:
    """An interval with its method and counts."""

    interval: tuple[float, float] | None
    method: IntervalMethod | None = None
    counts: Mapping[str, float] | None = None


def check_gate(
    gate: Gate,
    metrics: Metrics,
    uncertainty: Mapping[str, Uncertainty] | None = None,
    *,
    equal: str | None = None,
    like: Verdict | None = None,
) -> Verdict:
    """Check a gate; pure. Undefined and infinite metrics close it.

    With ``gate.confidence``, a bound of the two-sided interval is compared. If the true value is at the threshold, the
    gate then passes by chance in about half of the remaining share: 2.5 % at 0.95.

    Args:
        uncertainty: metric → its uncertainty.
        equal: the reason why both compared models are the same; None if they differ. The difference of equal models is
            0 by construction, so the gate is closed.
        like: the recorded verdict that is judged again; its interval method is used. None: a new verdict.

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
    known = uncertainty or {}
    measured, metric_uncertainty = evidence[gate.metric], known.get(gate.metric)
    confidence = DEFAULT_CONFIDENCE if gate.confidence is None else gate.confidence
    if _is_of_earlier_method(like, metric_uncertainty):
        found = _judge_as_before(gate.metric, evidence, known, confidence)
    else:
        found = _judge(gate.metric, evidence, known, confidence, like)
    interval = found.interval
    judged = (measured, measured) if gate.confidence is None else interval or (None, None)
    reason = equal if gate.metric in COMPARISONS else None
    if gate.metric == LEAD_SHARE and measured is None:
        reason = NO_LEAD
    warning = None
    if (
        measured is not None
        and reason is None
        and (metric_uncertainty is not None or gate.confidence is not None)
    ):
        warning = _warning(gate.bound, found, metric_uncertainty, confidence)
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
        method=found.method,
        counts=dict(found.counts or {}),
        confidence=gate.confidence,
        reason=reason,
        warning=warning,
    )


def check_artifact_gate(
    gate: Gate, artifact: StoredArtifact, *, equal: str | None = None, like: Verdict | None = None
) -> Verdict:
    """Judge a gate as ``check_gate`` does, on the metrics of an artifact."""
    return check_gate(gate, artifact.metrics, artifact.uncertainty, equal=equal, like=like)


def recorded_verdict(recorded: Sequence[Verdict], place: int, gate: Gate) -> Verdict | None:
    """Return the recorded verdict of a step's gate number ``place``; None: there is none for its metric."""
    earlier = recorded[place] if place < len(recorded) else None
    return earlier if earlier is not None and earlier.metric == gate.metric else None


def _is_of_earlier_method(like: Verdict | None, uncertainty: Uncertainty | None) -> bool:
    """Return whether an earlier version judged; none could, where only this one measures what is recorded."""
    if like is None or like.method is not None:
        return False
    return uncertainty is None or (uncertainty.differing is None and uncertainty.equal_prompts is None)


def _judge(
    metric: str,
    evidence: Metrics,
    uncertainty: Mapping[str, Uncertainty],
    confidence: float,
    like: Verdict | None,
) -> _Judged:
    measured, own = evidence[metric], uncertainty.get(metric)
    if measured is None or own is None:
        return _Judged(None)
    counts: dict[str, float] = {"rows": own.rows}
    if own.differing is not None:
        counts["differing_rows"] = own.differing * own.rows
    if own.equal_prompts is not None:
        counts["equal_prompts"] = own.equal_prompts
    critic = carried(metric, evidence, uncertainty)
    if critic is not None:
        counts["carrying_prompts"] = critic.prompts
    method = method_of(metric, measured, own)
    if method == "wilson" and (like is None or like.method != method):  # otherwise an earlier version judged
        return _Judged(gate_interval_of_share(measured, own, confidence=confidence), "share", counts)
    return _Judged(interval_among(metric, evidence, uncertainty, confidence=confidence), method, counts)


def _judge_as_before(
    metric: str, evidence: Metrics, uncertainty: Mapping[str, Uncertainty], confidence: float
) -> _Judged:
    measured, own = evidence[metric], uncertainty.get(metric)
    if measured is None or own is None:
        return _Judged(None)
    return _Judged(earlier_interval_of(metric, measured, own, confidence=confidence))


def _meets(gate: Gate, low: float | None, high: float | None) -> bool:
    """Return whether the range from ``low`` to ``high`` meets the gate's bound; an undefined range does not."""
    if low is None or high is None:
        return False
    return (gate.at_least is None or low >= gate.at_least) and (gate.at_most is None or high <= gate.at_most)


def _warning(
    threshold: float,
    found: _Judged,
    metric_uncertainty: Uncertainty | None,
    confidence: float,
) -> str | None:
    """Return the reason why it is not clear on which side of the threshold the true value lies; None if it is."""
    interval = found.interval
    if interval is None:
        carrying = (found.counts or {}).get("carrying_prompts", math.inf)
        if carrying < MIN_CARRYING_PROMPTS:
            return (
                f"too few to tell: about {carrying:.2g} prompts carry the squares, {MIN_CARRYING_PROMPTS} are "
                "needed; measure on more prompts of the rarer outcome"
            )
        few = metric_uncertainty is None or metric_uncertainty.n < 2
        if found.method == "fieller" and not few:
            return "too few to tell: the teacher's lead is not clearly above 0, so its share has no interval; measure more responses"
        return (
            f"too few to tell: {'one prompt has' if few else 'prompts that do not differ have'} no interval"
        )
    if interval[0] <= threshold <= interval[1]:
        return f"too few to tell: the {_percent(confidence)} interval contains {threshold:g}"
    return None
