"""Losses that bound the ratio by other means than PPO's clip: a weight, a soft gate, or a mean over the response."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vantage.algorithms.aggregation import Aggregation, Denominator
from vantage.algorithms.importance import sequence_mean
from vantage.algorithms.masking import check_response_mask, keep
from vantage.algorithms.metrics import SumCount, sum_count
from vantage.algorithms.policy_loss import (
    PolicyLoss,
    RatioLevel,
    check_clip_ranges,
    log_range,
    log_ratio_of_level,
    policy_loss_of,
    where_clip_binds,
)

LARGEST_LOG_RATIO = 20.0
"""Logarithm of a ratio at which the soft gate is flat in float32 and float64; a much larger ratio would overflow."""


@dataclass(frozen=True)
class ClippedWeightLoss(PolicyLoss):
    """A loss that clips its weight and keeps every gradient, so `clip_fraction` is 0.

    `weight_clip_fraction`: tokens whose weight the range has changed.
    """

    weight_clip_fraction: SumCount


@dataclass(frozen=True)
class SoftGateLoss(PolicyLoss):
    """A loss without a clip, so `clip_fraction` is 0. `gate_slope`: df/dρ, between 0 and 1, by which the gate weakens a gradient."""

    gate_slope: SumCount


def clipped_weight_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_range_low: float | None,
    clip_range_high: float | None,
    aggregation: Aggregation,
    ratio_level: RatioLevel = "token",
    denominator: Denominator | None = None,
) -> ClippedWeightLoss:
    """Return the policy gradient, weighted by a clipped ratio that is a constant.

        −sg[clip(ρ, 1 − clip_range_low, 1 + clip_range_high)]·A·logprobs

    CISPO, arXiv 2506.13585; the paper bounds only from above. No token loses its gradient. All tensors (B,T),
    log-probabilities in nats; a range of None sets no limit on that side. `ratio_level`, `aggregation` and
    `denominator` are
    those of `clipped_surrogate`.

    Raises ValueError as `clipped_surrogate`.
    """
    check_response_mask(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_clip_ranges(clip_range_low, clip_range_high, None)
    kept_logprobs = keep(logprobs, response_mask)
    token_log_ratio = kept_logprobs.detach() - keep(old_logprobs.detach(), response_mask)
    log_ratio = log_ratio_of_level(token_log_ratio, response_mask, level=ratio_level)
    lowest, highest = log_range(clip_range_low, clip_range_high)
    weight = log_ratio.clamp(min=lowest, max=highest).exp()
    nothing = torch.zeros_like(response_mask)
    plain = policy_loss_of(
        -weight * keep(advantages.detach(), response_mask) * kept_logprobs,
        token_log_ratio,
        response_mask,
        clip_binds=nothing,
        dual_clip_binds=nothing,
        aggregation=aggregation,
        denominator=denominator,
    )
    is_clipped = (log_ratio < lowest) | (log_ratio > highest)
    return ClippedWeightLoss(
        **_fields(plain), weight_clip_fraction=sum_count(is_clipped.float(), response_mask)
    )


def soft_gate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
    aggregation: Aggregation,
    ratio_level: RatioLevel = "token",
    denominator: Denominator | None = None,
) -> SoftGateLoss:
    """Return the surrogate with a soft gate in place of the clip.

        −f(ρ)·A,   f(ρ) = 4/τ·σ(τ·(ρ − 1)),   τ = temperature_positive where A > 0, else temperature_negative

    SAPO, arXiv 2511.20347 (1 and 1.05). At ρ = 1 the gradient is the policy gradient; away from it the slope
    f′ = 4·σ·(1 − σ) falls towards 0, faster for a larger τ. All tensors (B,T), log-probabilities in nats.
    `ratio_level`, `aggregation` and `denominator` are those of `clipped_surrogate`.

    Raises ValueError for a temperature that is not positive, unequal shapes, and as `aggregate`.
    """
    check_response_mask(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    for name, value in (("positive", temperature_positive), ("negative", temperature_negative)):
        if not value > 0:
            raise ValueError(f"temperature_{name}={value} is not positive; the paper uses 1 and 1.05")
    kept_advantages = keep(advantages.detach(), response_mask)
    token_log_ratio = keep(logprobs, response_mask) - keep(old_logprobs.detach(), response_mask)
    log_ratio = log_ratio_of_level(token_log_ratio, response_mask, level=ratio_level)
    # `where` of two numbers would round them to float32
    temperature = torch.full_like(log_ratio, temperature_negative)
    temperature = temperature.masked_fill(kept_advantages > 0, temperature_positive)
    # The gate is flat there, and an overflowing ratio times a slope of 0 would be NaN
    opened = torch.sigmoid(temperature * (log_ratio.clamp(max=LARGEST_LOG_RATIO).exp() - 1))
    nothing = torch.zeros_like(response_mask)
    plain = policy_loss_of(
        -4 / temperature * opened * kept_advantages,
        token_log_ratio.detach(),
        response_mask,
        clip_binds=nothing,
        dual_clip_binds=nothing,
        aggregation=aggregation,
        denominator=denominator,
    )
    return SoftGateLoss(**_fields(plain), gate_slope=sum_count(4 * opened * (1 - opened), response_mask))


def geometric_mean_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_range_low: float | None,
    clip_range_high: float | None,
    aggregation: Aggregation,
    denominator: Denominator | None = None,
) -> PolicyLoss:
    """Return the surrogate whose ratio is the geometric mean, over a response, of clipped ratios of its tokens.

        −Ā·exp(mean_t log ρ̃_t),   ρ̃_t = min(ρ_t, 1 + clip_range_high) where A > 0, max(ρ_t, 1 − clip_range_low) where A < 0

    GMPO, arXiv 2507.20673, which clips to (e^−0.4, e^0.4). Ā is the mean of the response's advantages, which are equal
    in GMPO. Every token of a response has this loss, so `aggregation` weighs responses: `sequence` equally, `token` by length.
    All tensors (B,T), log-probabilities in nats; a range of None does not clip on that side.

    Raises ValueError as `clipped_surrogate`.
    """
    check_response_mask(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_clip_ranges(clip_range_low, clip_range_high, None)
    kept_advantages = keep(advantages.detach(), response_mask)
    log_ratio = keep(logprobs, response_mask) - keep(old_logprobs.detach(), response_mask)
    lowest, highest = log_range(clip_range_low, clip_range_high)
    clipped = torch.where(
        kept_advantages > 0,
        log_ratio.clamp(max=highest),
        torch.where(kept_advantages < 0, log_ratio.clamp(min=lowest), 0.0),
    )
    ratio = sequence_mean(clipped, response_mask).exp()
    return policy_loss_of(
        -sequence_mean(kept_advantages, response_mask) * ratio,
        log_ratio.detach(),
        response_mask,
        clip_binds=where_clip_binds(log_ratio, kept_advantages, lowest=lowest, highest=highest),
        dual_clip_binds=torch.zeros_like(response_mask),
        aggregation=aggregation,
        denominator=denominator,
    )


def _fields(loss: PolicyLoss) -> dict[str, Any]:
    """Return the fields of a loss by name."""
    return {each.name: getattr(loss, each.name) for each in fields(loss)}
