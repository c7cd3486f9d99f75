"""Standard errors of held-out measurements whose rows come in clusters.

Several responses to one prompt, and several pairs of one prompt, are alike: only prompts were drawn independently.
A standard error that counts rows is too small by up to the square root of the rows of a cluster. Everything is
computed in float64 on the CPU.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vantage.algorithms.groups import index_of_groups
from vantage.algorithms.masking import check_response_mask, check_shape


@dataclass(frozen=True)
class Estimate:
    """A measured number with its standard error; NaN where undefined, as the error of a single cluster is."""

    value: float
    standard_error: float
    num_clusters: int
    num_rows: int
    intervals: tuple[tuple[float, float, float], ...] = ()
    """(confidence, low, high), by confidence, for a resampled statistic, which is no mean. Empty: the interval follows
    from the standard error."""
    differing: float | None = None
    """Share of rows in which the two sides differ; only for a comparison of shares."""
    equal_clusters: float | None = None
    """Number of clusters of equal size with the same variance, if the clusters' sizes differ; None: they are equal."""


def clustered_mean(values: Tensor, clusters: Tensor) -> Estimate:
    """Return the mean of `values` (N,), each row counted once; `clusters` (N,) are the rows' prompts, integers.

    The error is that of `clustered_ratio` with denominators of 1. For clusters of one size it is the standard
    deviation of their means (ddof 1) over √clusters.

    Raises ValueError for unequal shapes or no row.
    """
    return clustered_ratio(values, torch.ones_like(values, dtype=torch.float64), clusters)


def clustered_ratio(numerators: Tensor, denominators: Tensor, clusters: Tensor) -> Estimate:
    """Return r = Σ numerators / Σ denominators over N rows, for example NLL per token, with its error over clusters.

    With s_c and m_c the sums of cluster c of n, and M = Σ m_c:

        standard error² = n/(n − 1) · Σ_c (s_c − r·m_c)² / M²

    This is the linearised error of a ratio estimator (Cochran, Sampling Techniques, 1977, eq. 6.10, clusters as units).
    All (N,); `clusters` integers of any value.

    Raises ValueError for unequal shapes, no row, or denominators whose sum is not positive.
    """
    rows = tuple(numerators.shape)
    if len(rows) != 1 or not rows[0]:
        raise ValueError(f"numerators has shape {rows}; it must be (N,) with one row or more")
    check_shape("denominators", denominators, rows)
    index, sizes = index_of_groups(clusters.cpu(), rows[0])
    sums, counts = (_sums(each, index, len(sizes)) for each in (numerators, denominators))
    total = counts.sum()
    if not total > 0:
        raise ValueError(f"denominators sum to {total.item():g}; a ratio needs a positive sum")
    ratio = sums.sum() / total
    n = len(sizes)
    squares = (sums - ratio * counts).square().sum() / total.square()
    error = (squares * n / (n - 1)).sqrt().item() if n > 1 else float("nan")
    return Estimate(value=ratio.item(), standard_error=error, num_clusters=n, num_rows=rows[0])


def with_differing(estimate: Estimate, differences: Tensor) -> Estimate:
    """Add the mean of |`differences`| (N,), each from −1 to 1: for right or wrong answers, the share of rows that
    differ."""
    return replace(estimate, differing=differences.detach().cpu().double().abs().mean().item())


def with_cluster_sizes(estimate: Estimate, clusters: Tensor) -> Estimate:
    """Add the number of equal clusters with the same variance: (Σ m)²/Σ m² over clusters of m rows (Kish, 1965).

    `clusters` (N,) are the rows' clusters, integers. The estimate is unchanged if all have one size.
    """
    _, sizes = index_of_groups(clusters.cpu(), len(clusters))
    counts = sizes.double()
    if bool((counts == counts[0]).all()):
        return estimate
    return replace(estimate, equal_clusters=(counts.sum().square() / counts.square().sum()).item())


def clustered_explained_variance(
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    clusters: Tensor,
    *,
    least_variance: float = 0.0,
) -> Estimate:
    """Return 1 − Var(G − V)/Var(G) over all valid tokens, with its delete-one-cluster jackknife error.

    With θ_c the explained variance of all tokens except those of cluster c, and θ̄ the mean of the θ_c:

        standard error² = (n − 1)/n · Σ_c (θ_c − θ̄)²

    `values`, `returns`, `response_mask` (B,T); `clusters` (B,) integers. NaN if Var(G) is `least_variance` or
    less, for all tokens or after one deletion.

    Raises ValueError for an empty mask or unequal shapes.
    """
    check_response_mask(response_mask, values=values, returns=returns)
    if not bool(response_mask.any()):
        raise ValueError("response_mask has no True element; explained variance needs the whole held-out set")
    index, sizes = index_of_groups(clusters.cpu(), response_mask.shape[0])
    of_token = index[:, None].expand(response_mask.shape)[response_mask.cpu()]
    targets = returns.detach()[response_mask].cpu().to(torch.float64)
    errors = targets - values.detach()[response_mask].cpu().to(torch.float64)
    # The numbers are shifted by one of them, so that squares lose no digits and equal numbers have a variance of 0
    targets, errors = targets - targets[:1], errors - errors[:1]
    n = len(sizes)
    moments = torch.stack(
        [
            _sums(each, of_token, n)
            for each in (torch.ones_like(targets), targets, targets.square(), errors, errors.square())
        ]
    )
    whole = moments.sum(dim=1, keepdim=True)
    left = _explained_by_moments(whole - moments, least_variance)
    deviations = (left - left.mean()).square().sum() * (n - 1) / n
    return Estimate(
        value=_explained_by_moments(whole, least_variance).item(),
        standard_error=deviations.sqrt().item() if n > 1 else float("nan"),
        num_clusters=n,
        num_rows=int(response_mask.shape[0]),
    )


def _explained_by_moments(moments: Tensor, least_variance: float) -> Tensor:
    """Return explained variance by (count, ΣG, ΣG², Σe, Σe²) in the rows of `moments` (5,N); NaN if Var(G) is
    `least_variance` or less."""
    count, target, target_square, error, error_square = moments
    return_variance = target_square / count - (target / count).square()
    error_variance = error_square / count - (error / count).square()
    explained = 1 - error_variance / return_variance
    return torch.where(return_variance > least_variance, explained, torch.full_like(explained, float("nan")))


def _sums(values: Tensor, index: Tensor, num_clusters: int) -> Tensor:
    """Return the sums of `values` (N,) by cluster, (C,) in float64."""
    return torch.zeros(num_clusters, dtype=torch.float64).index_add(
        0, index, values.detach().cpu().to(torch.float64)
    )
