"""Measure how similarly a reward and a judge order the same responses, in float64 on the CPU."""

from dataclasses import replace

import torch
from torch import Tensor

from vantage.algorithms.masking import check_shape
from vantage.algorithms.uncertainty import Estimate, clustered_ratio

_ROWS_AT_ONCE = 512


def pair_agreement(scores: Tensor, judged: Tensor, clusters: Tensor) -> Estimate:
    """Return the share of pairs in which `scores` prefers the same row as `judged`, of the pairs that `judged`
    distinguishes; ties count half.

    All (N,); `clusters` are the rows' prompts, integers. 0.5 is chance, 1 the same order. With `judged` of 0 and 1 it is the area
    under the ROC curve (Mann-Whitney U / number of pairs), in general (1 + Somers' D(scores | judged)) / 2.

    With n_i of the d_i pairs of row i in agreement, a = Σ n_i / Σ d_i. Each pair counts in two rows, so the error is twice that of
    the ratio over rows:

        standard error² = m/(m − 1) · Σ_c (2 · Σ_{i∈c} (n_i − a·d_i) / Σ d_i)²

    over m clusters, the first-order projection of a U-statistic (Hoeffding 1948). NaN if `judged` distinguishes no two
    rows.

    Raises ValueError for unequal shapes or no row.
    """
    scores, judged = (each.detach().cpu().double() for each in (scores, judged))
    rows = tuple(scores.shape)
    check_shape("judged", judged, rows)
    agreeing, apart = _pairs_of_rows(scores, judged)
    if rows[0] and not bool(apart.any()):
        return Estimate(float("nan"), float("nan"), num_clusters=len(clusters.unique()), num_rows=rows[0])
    ratio = clustered_ratio(agreeing, apart, clusters)
    return replace(ratio, standard_error=2 * ratio.standard_error)


def _pairs_of_rows(scores: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row the number of its pairs that agree (ties of `scores` count half), and of those that `judged`
    distinguishes."""
    agreeing, apart = torch.zeros_like(scores), torch.zeros_like(scores)
    for start in range(0, len(scores), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        by_judge = (judged[rows, None] - judged[None, :]).sign()
        by_score = (scores[rows, None] - scores[None, :]).sign()
        apart[rows] = by_judge.abs().sum(dim=1)
        agreeing[rows] = ((1 + by_judge * by_score) / 2 * by_judge.abs()).sum(dim=1)
    return agreeing, apart
