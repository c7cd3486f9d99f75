"""Compute the surrogate that the switches describe, on the tokens of one micro-batch."""

from dataclasses import dataclass

from torch import Tensor

from vantage.algorithms.bounded_ratio import clipped_weight_gradient, geometric_mean_surrogate, soft_gate
from vantage.algorithms.policy_loss import (
    PolicyLoss,
    clipped_surrogate,
    masked_ratio_gradient,
    policy_gradient,
)
from vantage.schemas.recipe.algorithm import Algorithm


@dataclass(frozen=True)
class LossTokens:
    """Inputs of the surrogate from the tokens of a micro-batch, (B,T) each, and the denominator of their whole minibatch."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    denominator: int


def surrogate_loss(tokens: LossTokens, switches: Algorithm) -> PolicyLoss:
    """Return the surrogate that the switches describe."""
    given = (tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask)
    aggregation, denominator = switches.aggregation, tokens.denominator
    low, high = switches.clip_range_low, switches.clip_range_high
    if not switches.importance_ratio:
        return policy_gradient(*given, aggregation=aggregation, denominator=denominator)
    if switches.ratio_mask:
        return masked_ratio_gradient(
            *given,
            clip_range_low=low,
            clip_range_high=high,
            through_ratio=switches.ratio_mask_gradient,
            aggregation=aggregation,
            denominator=denominator,
        )
    if switches.surrogate == "clipped_weight":
        return clipped_weight_gradient(
            *given,
            clip_range_low=low,
            clip_range_high=high,
            ratio_level=switches.ratio_level,
            aggregation=aggregation,
            denominator=denominator,
        )
    if switches.surrogate == "soft_gate":
        return soft_gate(
            *given,
            temperature_positive=switches.soft_gate_positive,
            temperature_negative=switches.soft_gate_negative,
            ratio_level=switches.ratio_level,
            aggregation=aggregation,
            denominator=denominator,
        )
    if switches.surrogate == "geometric_mean":
        return geometric_mean_surrogate(
            *given, clip_range_low=low, clip_range_high=high, aggregation=aggregation, denominator=denominator
        )
    return clipped_surrogate(
        *given,
        clip_range_low=low,
        clip_range_high=high,
        dual_clip=switches.dual_clip,
        ratio_level=switches.ratio_level,
        aggregation=aggregation,
        denominator=denominator,
    )
