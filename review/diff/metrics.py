"""Compare metrics of two stages, with the interval of their difference."""

import math
from collections.abc import Iterator

from vantage.review.diff.paired import (
    PairedDifference,
    Samples,
    kept_samples,
    paired_difference,
    reproduces,
    same_prompts,
)
from vantage.review.diff.sides import Step
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.difference import Interval, MetricDifference
from vantage.schemas.records.uncertainty import SHARES, Uncertainty, interval_of
from vantage.storage.storage import Storage

CONFIDENCE = 0.95
_DIFFERENCE_OF_SHARES = "accuracy_gain"
"""A metric whose interval is that of a difference of two shares (``interval_of``)."""


def metric_differences(
    a: Step, b: Step, samples: tuple[Samples, Samples] | None
) -> Iterator[MetricDifference]:
    """Yield every metric that either of two steps has.

    Args:
        samples: the samples that both kept, if they are evaluations on the same prompts.
    """
    ours, theirs = a.record.metrics, b.record.metrics
    for metric in dict.fromkeys((*ours, *theirs)):
        plain = _side_by_side(a, b, metric)
        if plain.difference is None:
            yield plain
            continue
        is_paired = samples is not None and all(
            reproduces(each, metric, side.get(metric))
            for each, side in zip(samples, (ours, theirs), strict=True)
        )
        paired = paired_difference(*samples, metric) if samples is not None and is_paired else None
        yield plain.model_copy(
            update=_unpaired(a, b, metric) if paired is None else _of_pairs(metric, paired)
        )


def samples_of(
    storage: Storage | None, a: tuple[Step, ResolvedRecipe], b: tuple[Step, ResolvedRecipe]
) -> tuple[tuple[Samples, Samples] | None, str | None]:
    """Return the samples of two evaluations on the same prompts, or the reason why there are none; (None, None) for
    steps that are no evaluations.

    Raises:
        OSError, ValueError: their files cannot be read.
    """
    found: list[Samples] = []
    for step, recipe in (a, b):
        stage = recipe.stages.get(step.name)
        if not isinstance(stage, PolicyEvaluation):
            return None, None
        if storage is None or step.artifact is None:
            return (
                None,
                f"{step.name}: the store does not have the samples of both sides, so metrics are not paired",
            )
        samples = kept_samples(storage.folder(step.artifact), stage)
        if samples is None:
            return None, f"{step.name}: no samples by prompt are kept, so metrics are not paired"
        found.append(samples)
    if not same_prompts(*found):
        return None, f"{a[0].name}: measured on other prompts, so metrics are not paired"
    return (found[0], found[1]), None


def _side_by_side(a: Step, b: Step, metric: str) -> MetricDifference:
    values = [step.record.metrics.get(metric) for step in (a, b)]
    errors = [_uncertainty(step, metric) for step in (a, b)]
    intervals = [
        None
        if value is None or error is None
        else _bounded(interval_of(metric, value, error, confidence=CONFIDENCE))
        for value, error in zip(values, errors, strict=True)
    ]
    before, after = values
    return MetricDifference(
        step=a.name,
        metric=metric,
        a=before,
        b=after,
        interval_a=intervals[0],
        interval_b=intervals[1],
        standard_error_a=errors[0].standard_error if errors[0] else None,
        standard_error_b=errors[1].standard_error if errors[1] else None,
        difference=_finite(None if before is None or after is None else after - before),
    )


def _finite(value: float | None) -> float | None:
    """Return the number; None for one beyond the largest number, such as the difference of two huge ones."""
    return value if value is not None and math.isfinite(value) else None


def _bounded(interval: Interval | None) -> Interval | None:
    """Return the interval; None if a bound is beyond the largest number."""
    return interval if interval is not None and all(map(math.isfinite, interval)) else None


def _uncertainty(step: Step, metric: str) -> Uncertainty | None:
    return None if step.artifact is None else step.artifact.uncertainty.get(metric)


def _of_pairs(metric: str, paired: PairedDifference) -> dict[str, object]:
    is_share = metric in SHARES
    kind = _DIFFERENCE_OF_SHARES if is_share else ""
    error = Uncertainty(
        n=paired.num_prompts,
        rows=paired.num_rows,
        standard_error=paired.standard_error,
        differing=paired.differing if is_share else None,
    )
    return {
        "difference": paired.value,
        "standard_error": paired.standard_error,
        "interval": interval_of(kind, paired.value, error, confidence=CONFIDENCE),
        "paired": True,
        "n": paired.num_prompts,
    }


def _unpaired(a: Step, b: Step, metric: str) -> dict[str, object]:
    """Return the error of a difference of two independent numbers, with Welch's degrees of freedom (1947)."""
    errors = [_uncertainty(step, metric) for step in (a, b)]
    known = [(each.standard_error, each.n) for each in errors if each is not None and each.n > 1]
    squares = [(error * error, n) for error, n in known if error is not None]
    if len(squares) < 2 or not (total := sum(square for square, _ in squares)):
        return {}
    if not math.isfinite(total):
        return {}
    degrees = 1 / sum((square / total) ** 2 / (n - 1) for square, n in squares)
    before, after = (step.record.metrics[metric] for step in (a, b))
    assert before is not None and after is not None, "there is a difference"
    interval = _bounded(_around(after - before, math.sqrt(total), degrees))
    return {} if interval is None else {"standard_error": math.sqrt(total), "interval": interval}


def _around(value: float, error: float, degrees: float) -> Interval:
    from scipy.special import stdtrit  # lazily: it takes a tenth of a second to load

    half = float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error
    return value - half, value + half
