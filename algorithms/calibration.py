"""Measure how well a reward model's probabilities agree with the preferences: accuracy, calibration, subgroups."""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 10
"""Bins of equal width over the confidence, from 0.5 to 1."""


@dataclass(frozen=True)
class ReliabilityBin:
    """Pairs whose confidence lies in one range; the range excludes its lower end (except 0.5)."""

    low: float
    high: float
    weight: float
    """Number of pairs in the bin."""
    mean_confidence: float
    """Mean confidence of the pairs; NaN for an empty bin, as is the accuracy."""
    accuracy: float


def preferred_probabilities(margins: Tensor) -> Tensor:
    """Return σ(chosen score − rejected score): the Bradley-Terry probability of the preferred response; any shape, float64."""
    return torch.sigmoid(margins.detach().cpu().double())


def brier_scores(margins: Tensor) -> Tensor:
    """Return (1 − σ(margin))² of each pair (N,): 0 for a certain right answer, 0.25 for no preference, 1 for a certain
    wrong one.

    (Brier, 1950, of the outcome "the chosen response is preferred", which is true of every pair.)
    """
    return (1 - preferred_probabilities(margins)).square()


def expected_calibration_error(
    margins: Tensor, weights: Tensor | None = None, *, num_bins: int = NUM_BINS
) -> Tensor:
    """Return Σ_b (W_b/W)·|accuracy of bin b − mean confidence of bin b|, for R sets of weights → (R,).

    This is the sum of |`calibration_gaps`| (Naeini et al., AAAI 2015; Guo et al., arXiv 1706.04599 eq. 3). It is
    positive even for pure noise.

    `margins` (N,); `weights` (R,N), None: one set of 1.

    Raises ValueError for no pair, or unequal shapes.
    """
    return calibration_gaps(margins, weights, num_bins=num_bins).abs().sum(dim=1)


def calibration_gaps(margins: Tensor, weights: Tensor | None = None, *, num_bins: int = NUM_BINS) -> Tensor:
    """Return (W_b/W)·(accuracy of bin b − mean confidence of bin b), for R sets of weights → (R,num_bins).

    The confidence of a pair is the probability of the response that the model prefers, max(σ(m), 1 − σ(m)), from 0.5 to
    1; the pair is right if m > 0, and half right if m = 0. So −m has the same confidence and the opposite outcome.
    There are `num_bins` bins of equal width from 0.5 to 1.

    `margins` (N,); `weights` (R,N), None: one set of 1.

    Raises ValueError for no pair, or unequal shapes.
    """
    confidence, right, index = _binned(margins, num_bins)
    weights = torch.ones(1, len(confidence), dtype=torch.float64) if weights is None else weights
    if weights.shape[1:] != confidence.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}; it must be (R,{len(confidence)})")
    gaps = torch.zeros(len(weights), num_bins, dtype=torch.float64)
    gaps.index_add_(1, index, weights.cpu().double() * (right - confidence))
    return gaps / weights.cpu().double().sum(dim=1, keepdim=True)


def reliability(margins: Tensor, *, num_bins: int = NUM_BINS) -> tuple[ReliabilityBin, ...]:
    """Return the table behind `expected_calibration_error`; `margins` (N,)."""
    confidence, right, index = _binned(margins, num_bins)
    bins = []
    for place in range(num_bins):
        inside = index == place
        bins.append(
            ReliabilityBin(
                low=0.5 + 0.5 * place / num_bins,
                high=0.5 + 0.5 * (place + 1) / num_bins,
                weight=float(inside.sum()),
                mean_confidence=confidence[inside].mean().item(),
                accuracy=right[inside].mean().item(),
            )
        )
    return tuple(bins)


def _binned(margins: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, right (1, 0, or 0.5) and bin of each pair, (N,) each."""
    if margins.dim() != 1 or not len(margins):
        raise ValueError(f"margins has shape {tuple(margins.shape)}; it must be (N,) with one pair or more")
    probability = preferred_probabilities(margins)
    confidence = torch.maximum(probability, 1 - probability)
    right = (margins > 0).cpu().double() + 0.5 * (margins == 0).cpu().double()
    index = ((confidence - 0.5) * 2 * num_bins).ceil().long().clamp(min=1, max=num_bins) - 1
    return confidence, right, index
