"""The length-controlled win rate: how often a model would win if its responses were as long as the other's."""

import torch
from torch import Tensor

PRIOR_VARIANCE = 1.0
"""Variance of the normal prior (mean 0) on the length's coefficient. It keeps the coefficient finite if length
decides every pair."""
_MOST_STEPS = 100
_LONGEST_STEP = 2.0
_SMALL_STEP = 1e-9


def length_controlled_win_rate(wins: Tensor, length_differences: Tensor, weights: Tensor) -> Tensor:
    """Return σ(θ) of the logistic regression σ(θ + φ·tanh(d/s)) of wins on the difference in length, for R sets of weights.

    With y_i the win of pair i (1, 0, or 0.5 for a tie), d_i its difference in length, s the standard deviation of the
    d_i (ddof 1), all under the weights w_i:

        minimise over θ, φ:  −Σ_i w_i·(y_i·log p_i + (1 − y_i)·log(1 − p_i)) + φ²/2,   p_i = σ(θ + φ·tanh(d_i/s))

    After Dubois et al., arXiv 2404.04475 §3: the win rate that the regression predicts for equal lengths. Their term
    for the difficulty of an instruction is left out, since it is estimated from many models. Their φ has an L1 penalty
    chosen by cross-validation; here φ has a normal prior of variance 1 (L2), and θ has none.

    `wins`, `length_differences` (N,); `weights` (R,N), not negative → (R,) in float64 on the CPU. If all pairs of a
    set are won (or lost), the rate is 1 (or 0). If the differences do not vary, length explains nothing, and the result
    is the plain win rate. NaN if the weights sum to 0.

    Raises ValueError for unequal shapes, or wins outside of 0 to 1.
    """
    wins, differences, weights = (
        each.detach().cpu().double() for each in (wins, length_differences, weights)
    )
    if wins.dim() != 1 or differences.shape != wins.shape or weights.shape[1:] != wins.shape:
        raise ValueError(
            f"wins {tuple(wins.shape)}, length_differences {tuple(differences.shape)} and weights "
            f"{tuple(weights.shape)} must be (N,), (N,) and (R,N)"
        )
    if not bool(((wins >= 0) & (wins <= 1)).all()):
        raise ValueError("wins has numbers outside of 0 to 1")
    rates = (weights * wins).sum(dim=1) / weights.sum(dim=1)
    scaled = torch.tanh(differences / _standard_deviations(differences, weights)[:, None])
    is_varied = (rates > 0) & (rates < 1)
    rates[is_varied] = torch.sigmoid(_intercepts(wins, scaled[is_varied], weights[is_varied]))
    return rates


def _standard_deviations(values: Tensor, weights: Tensor) -> Tensor:
    """Return the standard deviations (R,) of `values` (N,) under `weights` (R,N), which count rows; infinite if nothing
    varies."""
    sums = weights.sum(dim=1, keepdim=True)
    means = (weights * values).sum(dim=1, keepdim=True) / sums
    squares = (weights * (values - means).square()).sum(dim=1)
    variances = squares / (sums[:, 0] - 1)
    return torch.where(variances > 0, variances.sqrt(), torch.inf)


def _intercepts(wins: Tensor, scaled: Tensor, weights: Tensor) -> Tensor:
    """Return θ (R,) of the penalised regression, by Newton's method with bounded steps; NaN if it does not converge."""
    theta, phi = torch.zeros(2, len(weights), dtype=torch.float64)
    for _ in range(_MOST_STEPS):
        probability = torch.sigmoid(theta[:, None] + phi[:, None] * scaled)
        error, curvature = weights * (probability - wins), weights * probability * (1 - probability)
        slope_theta = error.sum(dim=1)
        slope_phi = (error * scaled).sum(dim=1) + phi / PRIOR_VARIANCE
        a, b = curvature.sum(dim=1), (curvature * scaled).sum(dim=1)
        c = (curvature * scaled.square()).sum(dim=1) + 1 / PRIOR_VARIANCE
        determinant = a * c - b * b
        step_theta = (c * slope_theta - b * slope_phi) / determinant
        step_phi = (a * slope_phi - b * slope_theta) / determinant
        size = torch.maximum(step_theta.abs(), step_phi.abs())
        shortened = torch.where(size > _LONGEST_STEP, _LONGEST_STEP / size, torch.ones_like(size))
        theta, phi = theta - shortened * step_theta, phi - shortened * step_phi
        if bool((size < _SMALL_STEP).all()):
            break
    return torch.where(size < 1e-6, theta, torch.nan) if len(weights) else theta
