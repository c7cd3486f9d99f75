"""Bootstrap over prompts: the uncertainty of statistics of held-out rows that are no means."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from vantage.algorithms.groups import index_of_groups
from vantage.algorithms.uncertainty import Estimate

Statistic = Callable[[Tensor], Tensor]
"""Weights of the rows (R,N), float64 → the statistic under each set of weights (R,)."""

CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Confidences of the intervals that are kept, whichever of them a gate will ask for."""
NUM_RESAMPLES = 2000
"""Resamples of the prompts; the ends of the interval at 0.99 are the tenth-lowest and tenth-highest of them."""
_MOST_WEIGHTS = 2_000_000
"""Numbers in one set of weights; keeps a batch of resamples below 16 MB."""


def bootstrapped(statistic: Statistic, clusters: Tensor, *, seed: int) -> Estimate:
    """Return the statistic of all rows, with the error and the percentile intervals that resampled prompts give it.

    Prompts are drawn with replacement, each with all of its rows, and of a comparison with the rows of both models: a
    paired bootstrap (Efron and Tibshirani, 1993, ch. 13). The same seed gives the same numbers. Where a resample leaves
    the statistic undefined there is no error and no interval.

    Args:
        clusters: (N,) integers, the rows' prompts.

    Raises:
        ValueError: no row.
    """
    index, sizes = index_of_groups(clusters.cpu(), len(clusters))
    n, num_rows = len(sizes), len(index)
    if not num_rows:
        raise ValueError("there is no row to resample; give one or more")
    value = statistic(torch.ones(1, num_rows, dtype=torch.float64)).item()
    error = float("nan")
    intervals: tuple[tuple[float, float, float], ...] = ()
    if n > 1 and value == value:
        drawn = _distribution(statistic, index, n, seed=seed)
        if bool(drawn.isfinite().all()):
            error, intervals = drawn.std().item(), percentile_intervals(drawn)
    return Estimate(value=value, standard_error=error, num_clusters=n, num_rows=num_rows, intervals=intervals)


def percentile_intervals(drawn: Tensor) -> tuple[tuple[float, float, float], ...]:
    """Return (confidence, low, high) for each of ``CONFIDENCES``: quantiles of the resampled statistic (R,)."""
    levels = torch.tensor(CONFIDENCES, dtype=torch.float64)
    low, high = drawn.quantile((1 - levels) / 2), drawn.quantile((1 + levels) / 2)
    return tuple(zip(CONFIDENCES, low.tolist(), high.tolist(), strict=True))


def _distribution(statistic: Statistic, index: Tensor, n: int, *, seed: int) -> Tensor:
    """Return the statistic of every resample, (R,)."""
    import numpy as np  # lazily, with scipy.stats: together a second
    from scipy.stats import DegenerateDataWarning, bootstrap

    def of_resamples(drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        """Compute the statistic of resamples; ``drawn`` (R,n): places of the drawn prompts."""
        counts = torch.zeros(len(drawn), n, dtype=torch.float64)
        places = torch.from_numpy(np.ascontiguousarray(drawn))
        counts.scatter_add_(1, places, torch.ones(places.shape, dtype=torch.float64))
        found: np.ndarray = statistic(counts[:, index]).numpy()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # the caller looks at the resamples itself
        result = bootstrap(
            (np.arange(n),),
            of_resamples,
            n_resamples=NUM_RESAMPLES,
            batch=max(1, _MOST_WEIGHTS // len(index)),
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    return torch.from_numpy(result.bootstrap_distribution)
