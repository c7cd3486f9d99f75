"""The uncertainty of a metric: its standard error over independent prompts, and its interval.

Responses to one prompt, and pairs of one prompt, are correlated; only prompts are independent. So n counts prompts,
not rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.metric_names import DISTINCT, JUDGED, LEAD_SHARE, LENGTH_GROUPS, PASS_AT
from vantage.schemas.recipe.fields import is_unset
from vantage.schemas.records.interval_formulas import (
    around_zero_to_infinity,
    bounded_score,
    paired_shares,
    share_of_gate,
    student,
    wilson,
)

_JUDGES = ("", *(f"{name}_" for name in JUDGED.values()))
"""Prefixes of the metrics of the first judge, and of the second one by its kind."""
_RATES = ("win_rate", "length_controlled_win_rate")

SHARES = frozenset(
    {"pair_accuracy", "validation_pair_accuracy", "truncated_share", "baseline_truncated_share"}
    | {"order_disagreement"}
    | {f"{judge}{share}" for judge in _JUDGES for share in ("win_rate", "tied_pairs")}
    | {f"{side}{greedy}accuracy" for side in ("", "baseline_") for greedy in ("", "greedy_")}
    | {f"pair_accuracy_{group}" for group in LENGTH_GROUPS}
    | {f"{side}pass_at_{k}" for side in ("", "baseline_") for k in PASS_AT}
)
"""Metrics that are shares: means of numbers from 0 to 1."""

SHARE_DIFFERENCES = frozenset(
    {"accuracy_gain", "truncated_share_difference"} | {f"pass_at_{k}_difference" for k in PASS_AT}
)
"""Differences of two shares, from −1 to 1."""

_PAIRED_RATES = frozenset(f"{judge}{rate}" for judge in _JUDGES for rate in _RATES)
"""Win rates: 1/2 + half of the difference of two paired shares, those of the pairs that either model wins."""

_LOGARITHMIC = frozenset({"perplexity", "baseline_perplexity", "perplexity_ratio"})
"""Exponentials of means."""

_BOUNDS = {"brier_score": (0.0, 1.0), "rank_correlation": (-1.0, 1.0)}
"""Means of bounded numbers that are not shares → their bounds."""

_RATIO = "squared_advantage_ratio"
_EXPLAINED = "explained_variance"

COMPARISONS = frozenset(
    {"accuracy_gain", "score_gain", "perplexity_ratio", "response_nll_difference"}
    | {"truncated_share_difference", "mean_response_length_difference"}
    | {f"{judge}{rate}" for judge in _JUDGES for rate in _RATES}
    | {f"pass_at_{k}_difference" for k in PASS_AT}
    | {f"distinct_{n}_difference" for n in DISTINCT}
)
"""Metrics that compare two models; they mean nothing if both models are the same."""


Interval = tuple[float, float, float]
"""Confidence, lower and upper end."""


class Uncertainty(Frozen):
    """The uncertainty of a metric that was estimated from held-out rows."""

    n: Annotated[int, Field(ge=1)]
    """Independent prompts, each with all of its rows."""
    rows: Annotated[int, Field(ge=1)]
    """Responses or pairs that were averaged."""
    standard_error: Annotated[float, Field(ge=0.0)] | None
    """Clustered by prompt; None if undefined, as for a single prompt."""
    intervals: tuple[Interval, ...] = Field((), exclude_if=lambda intervals: not intervals)
    """(confidence, low, high), by confidence, for a statistic that is not a mean: its percentiles over resampled prompts.
    Empty: the interval follows from the standard error."""
    differing: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(None, exclude_if=is_unset)
    """Share of rows in which the two models differ, for a comparison of shares. None: unknown, or no comparison."""
    equal_prompts: Annotated[float, Field(ge=1.0)] | None = Field(None, exclude_if=is_unset)
    """(Σ m)²/Σ m² over prompts of m rows, if they differ in size: this number of prompts of one size varies as much
    (Kish, 1965). None: prompts have one size, or an earlier version or a training stage measured it."""


IntervalMethod = Literal[
    "t", "wilson", "share", "paired", "logarithmic", "bounded", "resampled", "explained", "fieller"
]
"""``t``: mean ± t·standard error. ``wilson``: Wilson's, for a share. ``share``: for a share at a gate, the wider of
Wilson's and the exact end on the side of the rarer outcome. ``paired``: for a difference of paired shares, the
wider of Tango's and Bonett and Price's. ``logarithmic``: t on the logarithm. ``bounded``: a score interval of a mean
between bounds. ``resampled``: kept percentiles. ``fieller``: kept ends of Fieller's interval of a ratio of two means. ``explained``: t on the logarithm of the part that is not explained; no
interval where too few prompts carry it."""

MIN_CARRYING_PROMPTS = 10
"""Fewest prompts that may carry the squares in an explained variance or a ratio of squares that has an interval."""
_PRIOR_PROMPTS = 2.0
"""Weight, in prompts, of the assumption that all rows of a prompt are equal."""


def method_of(metric: str, measured: float, uncertainty: Uncertainty) -> IntervalMethod:
    """Return the method by which the interval of a metric is computed."""
    if metric in SHARE_DIFFERENCES or (
        metric in _PAIRED_RATES and (uncertainty.differing is not None or uncertainty.rows == uncertainty.n)
    ):
        return "paired"
    if metric in SHARES or metric in _PAIRED_RATES:
        return "wilson"
    if metric in _LOGARITHMIC:
        return "logarithmic"
    if metric == _RATIO or metric.startswith(_EXPLAINED):
        return "explained"
    if metric in _BOUNDS:
        return "bounded"
    if metric == LEAD_SHARE:
        return "fieller"
    if uncertainty.intervals:
        return "resampled"
    if metric == "benchmark_score" and _is_of_answers(measured, uncertainty):
        return "wilson"
    return "t"


def interval_of(
    metric: str,
    measured: float,
    uncertainty: Uncertainty,
    *,
    confidence: float,
    carrying: float | None = None,
) -> tuple[float, float] | None:
    """Return the two-sided interval of a metric at a confidence, by the method that ``method_of`` names.

    All methods use Student's t with n − 1 degrees of freedom, n the prompts, or ``equal_prompts``. None for one prompt,
    for an unbounded mean without variation, for a resampled statistic above its greatest confidence or without
    variation, for a share of a lead that is not clearly above 0, and for an explained variance or ratio that too few
    prompts carry. docs/decisions/0050 has each method's coverage.

    Args:
        carrying: result of ``carrying_prompts``; None: not used.
    """
    error = uncertainty.standard_error
    if uncertainty.n < 2 or error is None:
        return None
    method = method_of(metric, measured, uncertainty)
    t = _quantile(uncertainty, confidence)
    if method in ("resampled", "fieller"):
        enough = (each for each in uncertainty.intervals if each[0] >= confidence)
        return next(((low, high) for _, low, high in enough if low < high), None)
    if method == "wilson":
        return wilson(measured, effective_rows(measured, uncertainty), t)
    if method == "paired":
        return _paired(metric, measured, uncertainty, t)
    if method == "bounded":
        lowest, highest = _BOUNDS[metric]
        prompts = uncertainty.equal_prompts or uncertainty.n
        return bounded_score(measured, error, prompts, t, lowest=lowest, highest=highest)
    if not error:
        return None
    if method == "logarithmic":
        return around_zero_to_infinity(measured, error, t)
    if method == "explained":
        return _explained(metric, measured, error, t, carrying)
    return measured - t * error, measured + t * error


def gate_interval_of_share(
    measured: float, uncertainty: Uncertainty, *, confidence: float
) -> tuple[float, float] | None:
    """Return the interval by which a gate judges a share: that of the method ``share``; None for one prompt."""
    if uncertainty.n < 2 or uncertainty.standard_error is None:
        return None
    t = _quantile(uncertainty, confidence)
    return share_of_gate(measured, effective_rows(measured, uncertainty), t, confidence)


def _quantile(uncertainty: Uncertainty, confidence: float) -> float:
    return student(confidence, max((uncertainty.equal_prompts or uncertainty.n) - 1, 1.0))


def effective_rows(share: float, uncertainty: Uncertainty) -> float:
    """Return the number of independent rows that would determine a share as precisely as these rows in clusters."""
    return _effective_rows(share * (1 - share), min(share, 1 - share), uncertainty)


def _effective_rows(variance: float, varied: float, uncertainty: Uncertainty) -> float:
    """Return the number of independent rows that would determine a mean as precisely as these rows in clusters.

    Rows of a prompt are alike, which divides their number by the design effect: the squared standard error over
    `variance`/rows. The few prompts that differ from the rest, about `varied`·n of them, do not establish it: two more are
    assumed whose rows are all equal, which is the greatest design effect. It is never below 1.

    Args:
        variance: variance of one row.
        varied: share of the rows that differ from most.
    """
    n, rows = uncertainty.n, uncertainty.rows
    prompts = uncertainty.equal_prompts or n
    most = rows / prompts
    if uncertainty.equal_prompts is None and rows % n:
        most = min(2 * most, float(rows))  # prompts differ in size, by an amount that is not recorded
    error = uncertainty.standard_error
    if not error or variance <= 0:
        return rows / most
    found = max(rows * error * error * (n - 1) / n / variance, 1.0)
    weight = varied * prompts
    assumed = (weight * found + _PRIOR_PROMPTS * most) / (weight + _PRIOR_PROMPTS)
    return rows / max(found, assumed)


def differing_share(difference: float, uncertainty: Uncertainty) -> float:
    """Return the share of rows in which the two models differ: as recorded, else from the second moment over prompts.

    With one row a prompt, Σ d² = n·(n − 1)·error² + n·difference² counts the pairs that differ. At least |difference|.
    """
    if uncertainty.differing is not None:
        return min(max(uncertainty.differing, abs(difference)), 1.0)
    n, error = uncertainty.n, uncertainty.standard_error or 0.0
    return min(max((n - 1) * error * error + difference * difference, abs(difference)), 1.0)


@dataclass(frozen=True)
class Carried:
    """The effective number of prompts behind an explained variance or a ratio of squares, with its uncertainty."""

    uncertainty: Uncertainty
    prompts: float
    """Effective number of prompts: (mean of squares / its standard error)²."""


def carried(
    metric: str, metrics: Mapping[str, float | None], uncertainty: Mapping[str, Uncertainty]
) -> Carried | None:
    """Return the number of prompts that carry a critic's metric; None: the metric has no such number.

    A mean of squares x that only k of many prompts have has a relative error of 1/√k. So (x/error)² prompts carry it, which is
    few where a reward is nearly always the same. The critic's squared error is used and, where each prompt has several
    responses, that of the mean of the others. A ratio of squares gets at least the jackknife's error of the explained
    variance, which is 1 minus the ratio.
    """
    own = uncertainty.get(metric)
    if own is None or method_of(metric, 0.0, own) != "explained":
        return None
    prompts = float(own.n)
    for name in ("value_mse", "others_mean_mse"):
        square, of = metrics.get(name), uncertainty.get(name)
        if square is not None and of is not None and of.standard_error:
            prompts = min(prompts, (square / of.standard_error) ** 2)
    whole = uncertainty.get(_EXPLAINED)
    if metric == _RATIO and whole is not None and whole.standard_error is not None and own.standard_error:
        error = max(own.standard_error, whole.standard_error)
        own = own.model_copy(update={"standard_error": error})
    return Carried(own, prompts)


def interval_among(
    metric: str,
    metrics: Mapping[str, float | None],
    uncertainty: Mapping[str, Uncertainty],
    *,
    confidence: float,
) -> tuple[float, float] | None:
    """Return the interval of one of a stage's metrics, as its gate computes it; None: it has none."""
    measured, own = metrics.get(metric), uncertainty.get(metric)
    if measured is None or own is None:
        return None
    critic = carried(metric, metrics, uncertainty)
    if critic is None:
        return interval_of(metric, measured, own, confidence=confidence)
    return interval_of(metric, measured, critic.uncertainty, confidence=confidence, carrying=critic.prompts)


def bracketed(interval: tuple[float, float] | None) -> str:
    """Return `` [0.221, 0.294]``, with two decimals or as many as show two digits of its width, or an empty text."""
    if interval is None:
        return ""
    width = interval[1] - interval[0]
    decimals = min(max(2, 1 - math.floor(math.log10(width))), 8) if width > 0 else 2
    return f" [{interval[0]:.{decimals}f}, {interval[1]:.{decimals}f}]"


def decimals_of(interval: tuple[float, float]) -> int:
    """Return two, or as many decimals as show one digit of the interval's width."""
    width = interval[1] - interval[0]
    return min(max(2, -math.floor(math.log10(width))), 8) if width > 0 else 2


def smallest_conclusive_share(threshold: float, n: int, *, confidence: float = 0.95) -> float | None:
    """Return the lowest share of n prompts whose interval lies above the threshold; None if even 1 does not."""
    t = student(confidence, n - 1) if n > 1 else math.inf
    for right in range(math.ceil(threshold * n), n + 1):
        if math.isfinite(t) and share_of_gate(right / n, float(n), t, confidence)[0] > threshold:
            return right / n
    return None


def _paired(metric: str, measured: float, uncertainty: Uncertainty, t: float) -> tuple[float, float]:
    is_rate = metric in _PAIRED_RATES
    difference = 2 * measured - 1 if is_rate else measured
    error = uncertainty.standard_error
    if is_rate and error is not None:
        uncertainty = uncertainty.model_copy(update={"standard_error": 2 * error})
    differing = differing_share(difference, uncertainty)
    rows = float(uncertainty.n)
    if uncertainty.differing is not None or uncertainty.rows == uncertainty.n:
        rows = _effective_rows(differing - difference * difference, differing, uncertainty)
    low, high = paired_shares(difference, differing, rows, t)
    return ((1 + low) / 2, (1 + high) / 2) if is_rate else (low, high)


def _explained(
    metric: str, measured: float, error: float, t: float, carrying: float | None
) -> tuple[float, float] | None:
    if carrying is not None and carrying < MIN_CARRYING_PROMPTS:
        return None
    left = measured if metric == _RATIO else 1 - measured
    found = around_zero_to_infinity(left, error, t)
    if found is None or metric == _RATIO:
        return found
    return 1 - found[1], 1 - found[0]


def _is_of_answers(measured: float, uncertainty: Uncertainty) -> bool:
    """Return whether a score's standard error is that of right or wrong answers, with some of each."""
    error = uncertainty.standard_error
    if not error or not 0 < measured < 1 or uncertainty.n < 2:
        return False
    return math.isclose(error * error * (uncertainty.n - 1), measured * (1 - measured), rel_tol=1e-6)
