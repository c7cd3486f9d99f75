"""Verdicts of a judge that was shown two responses in both orders."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SwappedVerdicts:
    """Verdicts of a judge on B pairs, from both orders of the two responses."""

    wins: Tensor
    """(B,), float64: 1 if both orders prefer the candidate, 0 if both prefer the baseline, else ½."""
    disagree: Tensor
    """(B,), bool: True where the verdicts in the two orders differ."""


def swapped_verdicts(*, candidate_first: Tensor, baseline_first: Tensor) -> SwappedVerdicts:
    """Return verdicts that count only if both orders agree; a pair on which the orders disagree is a tie.

    A judge that always prefers the first response therefore ties on every pair. This is the "conservative" rule of
    Zheng et al., arXiv 2306.05685 §3.4, against position bias.

    Both (B,): log-probability of the answer that prefers the first response minus that of the answer that prefers the
    second, in nats; 0 prefers neither.

    Raises ValueError for unequal shapes, or numbers that are not finite.
    """
    if candidate_first.dim() != 1 or candidate_first.shape != baseline_first.shape:
        raise ValueError(
            f"candidate_first {tuple(candidate_first.shape)} and baseline_first {tuple(baseline_first.shape)} must be (B,)"
        )
    if not bool(torch.isfinite(candidate_first).all() & torch.isfinite(baseline_first).all()):
        raise ValueError("candidate_first or baseline_first has numbers that are not finite")
    one, other = torch.sign(candidate_first.double()), -torch.sign(baseline_first.double())
    disagree = one != other
    return SwappedVerdicts(wins=torch.where(disagree, 0.5, (1 + one) / 2), disagree=disagree)
