"""The uncertainty of a metric: its standard error over independent prompts, and its interval.

Responses to one prompt, and pairs of one prompt, are correlated; only prompts are independent. So n counts prompts,
not rows.
"""

import math
from typing import Annotated

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.metric_names import DISTINCT, JUDGED, LENGTH_GROUPS, PASS_AT

_JUDGES = ("", *(f"{name}_" for name in JUDGED.values()))
"""Before the metrics of the first judge, and of the second one by its kind."""
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

_SHARE_DIFFERENCES = frozenset(
    {"accuracy_gain", "truncated_share_difference"} | {f"pass_at_{k}_difference" for k in PASS_AT}
)
"""Differences of two shares, from −1 to 1."""

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
    """(confidence, low, high), by confidence, of a statistic that is no mean: percentiles of it over resampled prompts.
    Empty: the interval follows from the standard error."""


def interval_of(
    metric: str, measured: float, uncertainty: Uncertainty, *, confidence: float
) -> tuple[float, float] | None:
    """Return the two-sided interval of a metric at a confidence; None for one prompt, or a mean without variation.

    Means: measured ± t·standard error, Student's t with n − 1 degrees of freedom. Shares: Wilson's score interval
    (1927) with the same t and an effective number of rows, so that 4 right of 4 has an interval below 1. A difference
    of shares that is the same at every prompt: none of n prompts differs from it, so at most a share t²/(n + t²) of all
    prompts does (Wilson's bound at 0 of n), each by at most 2.

    Of a resampled statistic: the measured one of the least confidence that is enough, so a little too wide in between;
    None above the greatest.
    """
    error = uncertainty.standard_error
    if uncertainty.n < 2 or error is None:
        return None
    if uncertainty.intervals:
        enough = (each for each in uncertainty.intervals if each[0] >= confidence)
        return next(((low, high) for _, low, high in enough), None)
    t = _t_quantile((1 + confidence) / 2, uncertainty.n - 1)
    if metric in SHARES:
        return _wilson(measured, effective_rows(measured, uncertainty), t)
    if metric in _SHARE_DIFFERENCES:
        half = t * error if error else 2 * t * t / (uncertainty.n + t * t)
        return max(measured - half, -1.0), min(measured + half, 1.0)
    return (measured - t * error, measured + t * error) if error else None


def effective_rows(share: float, uncertainty: Uncertainty) -> float:
    """Return number of independent rows with the same standard error: p·(1 − p)/standard error² · n/(n − 1).

    The last factor cancels the n − 1 in the standard error, so that n prompts with one row each are n rows. At most the
    actual number of rows. If all prompts are equal, the standard error is 0, which is too small for few prompts: then
    each prompt counts as one row.
    """
    error = uncertainty.standard_error
    if not error:
        return float(uncertainty.n)
    n = uncertainty.n
    return min(share * (1 - share) / error**2 * n / (n - 1), float(uncertainty.rows))


def smallest_conclusive_share(threshold: float, n: int, *, confidence: float = 0.95) -> float | None:
    """Return the lowest share of n prompts whose interval lies above the threshold; None if even 1 does not."""
    t = _t_quantile((1 + confidence) / 2, n - 1) if n > 1 else math.inf
    for right in range(math.ceil(threshold * n), n + 1):
        if math.isfinite(t) and _wilson(right / n, float(n), t)[0] > threshold:
            return right / n
    return None


def _wilson(share: float, rows: float, t: float) -> tuple[float, float]:
    weight = t * t / rows
    centre = (share + weight / 2) / (1 + weight)
    half = t * math.sqrt(share * (1 - share) / rows + weight / (4 * rows)) / (1 + weight)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _t_quantile(probability: float, degrees: int) -> float:
    from scipy.special import stdtrit  # lazily: it takes a tenth of a second to load

    return float(stdtrit(degrees, probability))
