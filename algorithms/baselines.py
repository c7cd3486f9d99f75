"""Baselines of whole responses that are computed beforehand, one number per prompt: PVPO, A*-PO and SPO.

No function here passes a gradient. Everything is computed in float64. Of all three papers, the abstracts and public
implementations were read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.algorithms.masking import check_shape


def sample_means(scores: Tensor) -> Tensor:
    """Return the mean over each prompt's samples, `scores` (P,K) → (P,): PVPO, arXiv 2508.21104. A = R − mean."""
    return _by_prompt(scores).mean(dim=1)


def optimal_values(scores: Tensor, *, beta: float) -> Tensor:
    """Return V* = β · log mean_k exp(R_k/β) over each prompt's samples, (P,K) → (P,): A*-PO, arXiv 2505.20686.

    This is the value of the best policy under a KL penalty of β to the policy of the samples. As β → 0 it approaches
    the largest score, for a large β the mean score.

    Raises ValueError for a β that is not positive.
    """
    if not beta > 0:
        raise ValueError(f"beta={beta} is not positive; A*-PO uses 1/2")
    exact = _by_prompt(scores)
    samples = torch.tensor(float(exact.shape[1]), dtype=torch.float64, device=exact.device)
    return beta * (torch.logsumexp(exact / beta, dim=1) - samples.log())


@dataclass(frozen=True)
class TrackedMeans:
    """Running means of P prompts' scores."""

    means: Tensor
    """(P,), float64."""
    weights: Tensor
    """(P,): effective number of scores in each mean."""


def tracked(
    before: TrackedMeans,
    prompts: Tensor,
    scores: Tensor,
    kl: Tensor,
    *,
    half_life: float,
    low: float,
    high: float,
) -> TrackedMeans:
    """Return the running means after a rollout's scores: SPO's value tracker, arXiv 2509.13232.

        ρ = clamp(2^(−KL / half_life), low, high)      n' = ρ·n + k      v' = (ρ·n·v + Σ r) / n'

    for each prompt with k scores r in this rollout; other prompts are unchanged. With one score this is
    v' = v + (r − v)/n', and with scores of 0 and 1 it is the mean of a Beta distribution.

    `prompts` (B,) numbers below P, in any order; `scores` (B,); `kl` (P,) in nats per token, how far the policy has moved
    since each prompt's last scores.

    Raises ValueError for unequal shapes.
    """
    check_shape("prompts", prompts, tuple(scores.shape))
    check_shape("kl", kl, tuple(before.means.shape))
    zeros = torch.zeros_like(before.means)
    sums = zeros.index_add(0, prompts, scores.detach().to(zeros))
    counts = zeros.index_add(0, prompts, torch.ones_like(scores).to(zeros))
    memory = torch.exp2(-kl / half_life).clamp(low, high)
    kept = memory * before.weights
    weights = kept + counts
    is_seen = counts > 0
    means = torch.where(is_seen, (kept * before.means + sums) / weights, before.means)
    return TrackedMeans(means=means, weights=torch.where(is_seen, weights, before.weights))


def _by_prompt(scores: Tensor) -> Tensor:
    if scores.dim() != 2 or not scores.shape[1]:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}; it must be (P,K), the samples of a prompt in a row"
        )
    return scores.detach().to(torch.float64)
