"""Bootstrap over prompts: the uncertainty of statistics of held-out rows that are not means."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from vantage.algorithms.groups import index_of_groups
from vantage.algorithms.uncertainty import Estimate

Statistic = Callable[[Tensor], Tensor]
"""Weights of the rows (R,N), float64 → the statistic under each set of weights: (R,), or (R,B) where noted."""

CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Confidences of the intervals that are kept, whichever of them a gate asks for."""
NUM_RESAMPLES = 2000
"""Resamples of the prompts; the ends of the interval at 0.99 are the tenth-lowest and tenth-highest of them."""
_MOST_WEIGHTS = 2_000_000
"""Numbers in one set of weights; this keeps a batch of resamples below 16 MB."""


def bootstrapped(statistic: Statistic, clusters: Tensor, *, seed: int) -> Estimate:
    """Return the statistic of all rows, with its standard deviation over resampled prompts.

    Prompts are drawn with replacement, each with all of its rows, in a comparison with the rows of both models: a
    paired bootstrap (Efron and Tibshirani, 1993, ch. 13). The same seed gives the same numbers. If the statistic is
    undefined for a resample, there is no standard error.

    Args:
        clusters: (N,) integers, the rows' prompts.

    Raises:
        ValueError: no row.
    """
    index, n = _places(clusters)
    value = statistic(torch.ones(1, len(index), dtype=torch.float64)).item()
    error = float("nan")
    if n > 1 and value == value:
        drawn = _distribution(statistic, index, n, seed=seed)
        if bool(drawn.isfinite().all()):
            error = drawn.std().item()
    return Estimate(value=value, standard_error=error, num_clusters=n, num_rows=len(index))


def bootstrapped_size(gaps: Statistic, clusters: Tensor, *, seed: int) -> Estimate:
    """Return Σ_b |gap_b| of all rows, with its intervals over resampled prompts.

    A resample with equal prompts has no information on those that were not drawn. So each drawn prompt has the opposite
    outcome with a chance of 2/(n + 4), n prompts: as if two of four further prompts had it (Agresti and Coull, 1998).

    With ‖·‖ the sum of sizes, g the gaps of all rows and g* those of a resample, the upper end of an interval is a quantile
    of ‖g*‖: noise makes ‖g‖ too large, and ‖g*‖ more so. The lower end is ‖g‖ less a quantile of ‖g* − g‖, at least 0: by
    the triangle inequality the true size is not below it where g* − g is spread like g less the truth.

    Args:
        gaps: weights (R,2N) of the rows, followed by those of the same rows with the opposite outcome → gaps (R,B).
        clusters: (N,) integers, the rows' prompts.

    Raises:
        ValueError: no row.
    """
    index, n = _places(clusters)
    num_rows = len(index)
    as_measured = torch.cat((torch.ones(num_rows), torch.zeros(num_rows))).double()[None]
    measured = gaps(as_measured)
    value, error = measured.abs().sum().item(), float("nan")
    intervals: tuple[tuple[float, float, float], ...] = ()
    if n > 1 and value == value:

        def sizes(weights: Tensor) -> Tensor:
            drawn = gaps(weights)
            return torch.stack((drawn.abs().sum(dim=1), (drawn - measured).abs().sum(dim=1)))

        drawn, distance = _distribution(sizes, index, n, seed=seed, opposite=2 / (n + 4))
        levels = (1 + torch.tensor(CONFIDENCES, dtype=torch.float64)) / 2
        low, high = (
            (value - distance.quantile(levels)).clamp(min=0.0),
            drawn.quantile(levels).clamp(min=value),
        )
        error = drawn.std().item()
        intervals = tuple(zip(CONFIDENCES, low.tolist(), high.tolist(), strict=True))
    return Estimate(value, error, num_clusters=n, num_rows=num_rows, intervals=intervals)


def _places(clusters: Tensor) -> tuple[Tensor, int]:
    """Return the index of each row's prompt (N,), from 0 on, and the number of prompts."""
    if not len(clusters):
        raise ValueError("there is no row to resample; give one or more")
    index, sizes = index_of_groups(clusters.cpu(), len(clusters))
    return index, len(sizes)


def _distribution(
    statistic: Statistic, index: Tensor, n: int, *, seed: int, opposite: float | None = None
) -> Tensor:
    """Return the statistic of every resample, (R,), or several rows of them.

    With ``opposite``, each drawn prompt has the opposite outcome with this chance, and the weights are (R,2N).
    """
    import numpy as np  # lazily, with scipy.stats: together a second
    from scipy.stats import DegenerateDataWarning, bootstrap

    rng = np.random.default_rng(seed)

    def of_resamples(drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        """Compute the statistic of resamples; ``drawn`` (R,n): places of the drawn prompts."""
        counts = torch.zeros(len(drawn), n, dtype=torch.float64)
        places = torch.from_numpy(np.ascontiguousarray(drawn))
        counts.scatter_add_(1, places, torch.ones(places.shape, dtype=torch.float64))
        weights = counts[:, index]
        if opposite is not None:
            turned = torch.from_numpy(rng.binomial(counts.long().numpy(), opposite)).double()[:, index]
            weights = torch.cat((weights - turned, turned), dim=1)
        found: np.ndarray = statistic(weights).numpy()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # the caller checks the resamples itself
        result = bootstrap(
            (np.arange(n),),
            of_resamples,
            n_resamples=NUM_RESAMPLES,
            batch=max(1, _MOST_WEIGHTS // len(index)),
            vectorized=True,
            method="percentile",
            rng=rng,
        )
    return torch.from_numpy(result.bootstrap_distribution)
