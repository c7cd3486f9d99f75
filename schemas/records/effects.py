"""Effects that an evaluation measured: how much better a candidate is than its baseline, and how sure that is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vantage.schemas.records.uncertainty import bracketed

Direction = Literal["better", "worse", "not shown", "unknown"]
"""``not shown``: the interval contains no difference. ``unknown``: the record has no interval."""


@dataclass(frozen=True)
class _Measure:
    """A headline metric that compares two policies."""

    metric: str
    name: str
    sides: tuple[str, str] | None
    """The metrics of candidate and baseline; None: the metric itself compares them."""
    equal: float
    """The value of two equal policies."""
    unit: str = ""


_MEASURES = (
    _Measure("accuracy_gain", "accuracy", ("accuracy", "baseline_accuracy"), 0.0),
    _Measure("score_gain", "score", ("score", "baseline_score"), 0.0),
    _Measure("preference_win_rate", "win rate", None, 0.5),
    _Measure("win_rate", "win rate", None, 0.5),
)
"""Measures in the order of their weight: right answers, the reward's score, a model's preferences."""


@dataclass(frozen=True)
class Effect:
    """The difference between a candidate and its baseline by one measure."""

    metric: str
    name: str
    """Name of the measure: ``accuracy``, ``score`` or ``win rate``."""
    value: float
    """Candidate minus baseline; the rate itself for a win rate."""
    equal: float
    """The value of two equal policies."""
    interval: tuple[float, float] | None
    """The interval at 95 %; None: the record has none."""
    sides: tuple[float, float] | None = None
    """Candidate and baseline; None for a win rate."""
    prompts: int | None = None
    """Number of independent prompts; None: the record does not contain it."""

    @property
    def direction(self) -> Direction:
        """Return whether the interval lies above or below the value of two equal policies."""
        if self.interval is None:
            return "unknown"
        low, high = self.interval
        return "better" if low > self.equal else "worse" if high < self.equal else "not shown"

    @property
    def short(self) -> str:
        """Return ``accuracy +0.311 (0.27 to 0.35)``."""
        interval = f" ({self._ends})" if self.interval is not None else ""
        return f"{self.name} {self._signed(self.value)}{interval}"

    @property
    def measured(self) -> str:
        """Return ``accuracy 0.911 against 0.600, a difference of +0.311 (95 % interval 0.27 to 0.35; 256 prompts)``."""
        if self.sides is None:
            compared = f"{self.name} {self.value:.3f}, where equal policies have {self.equal:g}"
        else:
            ours, theirs = self.sides
            compared = (
                f"{self.name} {ours:.3f} against {theirs:.3f}, a difference of {self._signed(self.value)}"
            )
        sure = (
            "no interval is recorded, so the certainty is unknown"
            if self.interval is None
            else f"95 % interval {self._ends}"
        )
        over = f"; {self.prompts:,} prompts" if self.prompts is not None else ""
        return f"{compared} ({sure}{over})"

    def sentence(self, candidate: str, baseline: str) -> str:
        """Return the effect in plain words, with its numbers."""
        begun = {
            "better": f"{candidate} is better than {baseline}",
            "worse": f"{candidate} is worse than {baseline}",
            "not shown": f"No difference between {candidate} and {baseline} is shown",
            "unknown": f"Whether {candidate} is better than {baseline} is not certain",
        }[self.direction]
        return f"{begun}: {self.measured}."

    @property
    def _ends(self) -> str:
        """Return ``0.27 to 0.35``, with as many digits as the interval needs."""
        return bracketed(self.interval)[2:-1].replace(", ", " to ")

    def _signed(self, value: float) -> str:
        return f"{value:.3f}" if self.sides is None else f"{value:+.3f}"


def effects_of(
    metrics: Mapping[str, float | None],
    intervals: Mapping[str, tuple[float, float]],
    prompts: Mapping[str, int],
) -> tuple[Effect, ...]:
    """Return the effects that an evaluation measured, the one with most weight first.

    Args:
        metrics: the evaluation's headline metrics.
        intervals: metric → its interval at 95 %.
        prompts: metric → number of independent prompts.
    """
    return tuple(
        Effect(
            metric=measure.metric,
            name=measure.name,
            value=value,
            equal=measure.equal,
            interval=intervals.get(measure.metric),
            sides=_sides(measure, metrics),
            prompts=prompts.get(measure.metric),
        )
        for measure in _MEASURES
        if (value := metrics.get(measure.metric)) is not None and _is_own(measure, metrics)
    )


def _sides(measure: _Measure, metrics: Mapping[str, float | None]) -> tuple[float, float] | None:
    values = [metrics.get(name) for name in measure.sides or ()]
    known = [value for value in values if value is not None]
    return (known[0], known[1]) if len(known) == 2 else None


def _is_own(measure: _Measure, metrics: Mapping[str, float | None]) -> bool:
    """Return whether the metric is a measure of its own: a win rate by accuracy or score repeats that measure."""
    if measure.metric == "win_rate":
        return "order_disagreement" in metrics and "preference_win_rate" not in metrics
    return measure.sides is None or _sides(measure, metrics) is not None
