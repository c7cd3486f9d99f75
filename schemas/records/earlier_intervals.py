"""Compute intervals for verdicts without a recorded method; new verdicts never use these.

A verdict is judged again by the method it was made with, so that records and signed statements of earlier versions stay
true. Nothing here may change.
"""

from vantage.schemas.records.interval_formulas import student, wilson
from vantage.schemas.records.uncertainty import SHARE_DIFFERENCES, SHARES, Uncertainty


def earlier_interval_of(
    metric: str, measured: float, uncertainty: Uncertainty, *, confidence: float
) -> tuple[float, float] | None:
    """Return the two-sided interval of a metric at a confidence; None for one prompt, or a mean without variation.

    Means: measured ± t·standard error, Student's t with n − 1 degrees of freedom. Shares: Wilson's score interval with
    the same t and an effective number of rows. Differences of shares: like means, or ±2·t²/(n + t²) where all prompts
    have the same difference. Resampled statistics: percentiles of the next greater confidence that is kept.
    """
    error = uncertainty.standard_error
    if uncertainty.n < 2 or error is None:
        return None
    if uncertainty.intervals:
        enough = (each for each in uncertainty.intervals if each[0] >= confidence)
        return next(((low, high) for _, low, high in enough), None)
    t = student(confidence, uncertainty.n - 1)
    if metric in SHARES:
        return wilson(measured, earlier_effective_rows(measured, uncertainty), t)
    if metric in SHARE_DIFFERENCES:
        half = t * error if error else 2 * t * t / (uncertainty.n + t * t)
        return max(measured - half, -1.0), min(measured + half, 1.0)
    return (measured - t * error, measured + t * error) if error else None


def earlier_effective_rows(share: float, uncertainty: Uncertainty) -> float:
    """Return the number of independent rows with the same standard error, at most the actual number of rows."""
    error = uncertainty.standard_error
    if not error:
        return float(uncertainty.n)
    n = uncertainty.n
    return min(share * (1 - share) / error**2 * n / (n - 1), float(uncertainty.rows))
