"""Weights for tokens that another policy drew than the one that learns from them."""

import math
from dataclasses import dataclass

from torch import Tensor

from vantage.algorithms.masking import check_response_mask, keep
from vantage.algorithms.metrics import SumCount, sum_count


@dataclass(frozen=True)
class ImportanceWeights:
    """`weights` (B,T), 0 outside the mask; the metrics are over valid tokens.

    `importance_weight`: of each, after the cap. `importance_capped`: 1 where the cap binds.
    """

    weights: Tensor
    importance_weight: SumCount
    importance_capped: SumCount


def truncated_importance_weights(
    logprobs: Tensor, sampler_logprobs: Tensor, response_mask: Tensor, *, cap: float
) -> ImportanceWeights:
    """Return min(π/π_sampler, cap) of each token; constants, through which no gradient flows.

    Truncated importance sampling (Ionides 2008); of tokens in reinforcement learning, arXiv 2510.18855. All tensors (B,T),
    log-probabilities in nats.

    Raises ValueError for a cap that is not above 0, and unequal shapes.
    """
    check_response_mask(response_mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    if not cap > 0:
        raise ValueError(f"cap={cap} is not above 0")
    log_ratio = keep(logprobs.detach(), response_mask) - keep(sampler_logprobs.detach(), response_mask)
    weights = log_ratio.clamp(max=math.log(cap)).exp() * response_mask
    return ImportanceWeights(
        weights,
        importance_weight=sum_count(weights, response_mask),
        importance_capped=sum_count((log_ratio > math.log(cap)).float(), response_mask),
    )
