"""Compute the variance of a gradient over rollouts, and the measures of a baseline that are compared with it.

A baseline b is judged by its advantages A = G − b. All of it is summed in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientMoments:
    """What the trace of a covariance needs of R gradients g_r, so that it can be computed again without them."""

    squared_norms: list[float]
    """‖g_r‖²."""
    products: list[float]
    """⟨g_r, ḡ⟩ with the mean gradient ḡ of all R."""


@dataclass(frozen=True)
class Baseline:
    """How well a baseline knows the return, in three ways; each is 0 for the batch's mean and 1 for the return itself."""

    explained_variance: float
    """1 − Var(A) / Var(G), over tokens: what EVPO switches by. It does not see a constant bias."""
    explained_mse: float
    """1 − mean A² / mean (G − m)², over tokens, m the mean return of each rollout: it sees a bias."""
    explained_weighted: float
    """1 − Σ w·A² / Σ w·(G − m)², w = ‖∇ log π‖² of each token: what the gradient sees of `explained_mse`."""


def gradient_moments(gradients: Tensor) -> GradientMoments:
    """Return the moments of gradients (R,P)."""
    exact = gradients.to(torch.float64)
    return GradientMoments(
        squared_norms=exact.square().sum(dim=1).tolist(), products=(exact @ exact.mean(dim=0)).tolist()
    )


def covariance_trace(moments: GradientMoments) -> float:
    """Return Σ over parameters of the sample variance (ddof 1): (Σ‖g_r‖² − R·‖ḡ‖²) / (R − 1); ‖ḡ‖² is the mean product.

    Raises ValueError for fewer than two gradients.
    """
    count = len(moments.squared_norms)
    if count < 2:
        raise ValueError(f"a variance needs two gradients or more, and here are {count}")
    return (math.fsum(moments.squared_norms) - math.fsum(moments.products)) / (count - 1)


def variance_ratio(above: GradientMoments, below: GradientMoments) -> float:
    """Trace of one baseline's covariance over that of another on the same rollouts."""
    return covariance_trace(above) / covariance_trace(below)


def jackknife_error(above: GradientMoments, below: GradientMoments) -> float:
    """Return the standard error of the `variance_ratio` over rollouts, each left out once from both."""
    count = len(above.squared_norms)
    without = [variance_ratio(_left_out(above, r), _left_out(below, r)) for r in range(count)]
    centre = math.fsum(without) / count
    return math.sqrt((count - 1) / count * math.fsum((ratio - centre) ** 2 for ratio in without))


def _left_out(moments: GradientMoments, r: int) -> GradientMoments:
    """Return the moments with rollout r left out; only the sum of their products is that of the gradients left:
    R'·‖ḡ'‖².
    """
    count = len(moments.squared_norms)
    squared_norms = moments.squared_norms[:r] + moments.squared_norms[r + 1 :]
    # ‖R·ḡ − g_r‖² = R²·‖ḡ‖² − 2R·⟨g_r, ḡ⟩ + ‖g_r‖², and R·‖ḡ‖² is the sum of the products
    total = count * math.fsum(moments.products) - 2 * count * moments.products[r] + moments.squared_norms[r]
    return GradientMoments(squared_norms, [total / (count - 1) ** 2] * (count - 1))


def judge_baseline(
    advantages: Tensor, returns: Tensor, above_mean: Tensor, token_weights: Tensor
) -> Baseline:
    """Return the three measures, over tokens (N,); `above_mean` is return less the mean return of its rollout."""
    advantages, returns, above_mean, weights = (
        tensor.to(torch.float64) for tensor in (advantages, returns, above_mean, token_weights)
    )
    return Baseline(
        explained_variance=1 - (advantages.var(correction=0) / returns.var(correction=0)).item(),
        explained_mse=1 - (advantages.square().sum() / above_mean.square().sum()).item(),
        explained_weighted=1
        - ((weights * advantages.square()).sum() / (weights * above_mean.square()).sum()).item(),
    )


def crossing(measures: Sequence[float], ratios: Sequence[float]) -> float | None:
    """Return where a curve of ratios against a measure passes 1, by straight lines between neighbours in `measures`.

    Of several passages the one at the largest measure counts; None where the ratios stay on one side.
    """
    points = sorted(zip(measures, ratios, strict=True), reverse=True)
    for (right, ratio_right), (left, ratio_left) in pairwise(points):
        if (ratio_right - 1) * (ratio_left - 1) <= 0 and ratio_right != ratio_left:
            return left + (1 - ratio_left) * (right - left) / (ratio_right - ratio_left)
    return None
