"""Losses of the policy: the clipped surrogate, plain and masked policy gradients, and imitation of correct responses."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from vantage.algorithms.aggregation import (
    Aggregation,
    Denominator,
    aggregate,
    check_denominator,
)
from vantage.algorithms.importance import sequence_mean
from vantage.algorithms.masking import (
    check_boolean,
    check_response_mask,
    check_shape,
    keep,
)
from vantage.algorithms.metrics import SumCount, sum_count

RatioLevel: TypeAlias = Literal["token", "sequence"]


@dataclass(frozen=True)
class PolicyLoss:
    """`loss` is 0-d and differentiable; the metrics are over valid tokens, and ρ is each token's own ratio in every loss.

    `clip_fraction`: tokens on which the clip binds, that is, removes the gradient.
    `dual_clip_fraction`: tokens on which the dual clip binds; no token counts in both. `approx_kl`: KL(old‖new)
    in nats by e^ℓ − 1 − ℓ with ℓ = logprobs − old_logprobs, samples from old. `ratio`: ρ = e^ℓ, and
    `ratio_deviation`: |ρ − 1|. At a rollout's first update they are 1 and 0. Only `ratio_deviation` shows that the
    policies are equal, since the expectation of `ratio` is 1 for any policy. `ratio_squared`: ρ², for the effective
    sample size (Σρ)²/Σρ².
    """

    loss: Tensor
    clip_fraction: SumCount
    dual_clip_fraction: SumCount
    approx_kl: SumCount
    ratio: SumCount
    ratio_deviation: SumCount
    ratio_squared: SumCount


@dataclass(frozen=True)
class PositiveExampleLoss:
    """`loss` is 0-d and differentiable; `positive_nll` is over tokens of correct responses, in nats."""

    loss: Tensor
    positive_nll: SumCount


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_range_low: float | None,
    clip_range_high: float | None,
    aggregation: Aggregation,
    dual_clip: float | None = None,
    ratio_level: RatioLevel = "token",
    denominator: Denominator | None = None,
) -> PolicyLoss:
    """Return PPO's clipped surrogate, with one clip range for each side.

        −min(ρ·A, clip(ρ, 1 − clip_range_low, 1 + clip_range_high)·A),   ρ = exp(logprobs − old_logprobs)

    arXiv 1707.06347 eq. 7; two ranges as in DAPO, arXiv 2503.14476 eq. 10. With `dual_clip` = c, the loss of a
    token of A < 0 is at most −c·A (arXiv 1912.09729 eq. 5). `ratio_level` is that of `log_ratio_of_level`; with
    `sequence` this is GSPO-token, and GSPO if a response has one advantage. All tensors (B,T), log-probabilities in
    nats; a
    range of None does not clip on that side. The gradient flows through `logprobs` only. `aggregation` and
    `denominator` are those of `vantage.algorithms.aggregation.aggregate`.

    Raises ValueError for a range that is not positive, `clip_range_low` above 1, `dual_clip` not above 1,
    unequal shapes, and as `aggregate`.
    """
    check_response_mask(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_clip_ranges(clip_range_low, clip_range_high, dual_clip)
    kept_advantages = keep(advantages.detach(), response_mask)
    token_log_ratio = keep(logprobs, response_mask) - keep(old_logprobs.detach(), response_mask)
    log_ratio = log_ratio_of_level(token_log_ratio, response_mask, level=ratio_level)

    # The minimum is a one-sided clip: from above where A > 0, from below where A < 0; the dual clip adds one from
    # above where A < 0. Clipping log ρ is the same, and keeps an overflowing ρ out of the graph, where a product
    # with 0 would be NaN. Where A = 0 the loss is 0 for every finite ρ.
    lowest, highest = log_range(clip_range_low, clip_range_high)
    highest_of_negative = math.inf if dual_clip is None else math.log(dual_clip)
    is_positive, is_negative = kept_advantages > 0, kept_advantages < 0
    clipped = torch.where(
        is_positive,
        log_ratio.clamp(max=highest),
        torch.where(
            is_negative, log_ratio.clamp(min=lowest, max=highest_of_negative), log_ratio.clamp(max=0.0)
        ),
    )
    return policy_loss_of(
        -kept_advantages * clipped.exp(),
        token_log_ratio.detach(),
        response_mask,
        clip_binds=where_clip_binds(log_ratio, kept_advantages, lowest=lowest, highest=highest),
        dual_clip_binds=is_negative & (log_ratio > highest_of_negative),
        aggregation=aggregation,
        denominator=denominator,
    )


def log_ratio_of_level(log_ratio: Tensor, response_mask: Tensor, *, level: RatioLevel) -> Tensor:
    """Return the logarithm of the ratio in each token's loss, from the tokens' own (B,T), in nats and 0 outside the
    mask.

        token     log ρ_t
        sequence  log s + log ρ_t − sg[log ρ_t],   log s = sg[mean over the response's tokens of log ρ]

    `sequence` has the response's geometric mean as its value, and passes each token's gradient on (GSPO-token, arXiv
    2507.18071). If a response has one advantage, the gradient is that of GSPO (eq. 7).

    Raises ValueError for an unknown level.
    """
    if level == "token":
        return log_ratio
    if level != "sequence":
        raise ValueError(f"ratio_level={level!r} is not one of {', '.join(get_args(RatioLevel))}")
    fixed = log_ratio.detach()
    return sequence_mean(fixed, response_mask) + (log_ratio - fixed)


def where_clip_binds(log_ratio: Tensor, advantages: Tensor, *, lowest: float, highest: float) -> Tensor:
    """Return where (B,T) the clip to these logarithms removes a gradient; all tensors are 0 outside the mask."""
    return ((advantages > 0) & (log_ratio > highest)) | ((advantages < 0) & (log_ratio < lowest))


def masked_ratio_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_range_low: float | None,
    clip_range_high: float | None,
    through_ratio: bool,
    aggregation: Aggregation,
    denominator: Denominator | None = None,
) -> PolicyLoss:
    """Return the policy gradient weighted by the ratio, without tokens whose ratio is out of range.

        −f(ρ)·A·logprobs,   f(ρ) = ρ for 1 − clip_range_low < ρ < 1 + clip_range_high, else 0

    arXiv 2607.07508 (SAO) eq. 1 and 3, where `old_logprobs` are the sampler's own. Unlike by a clip, a token is left
    out whatever the sign of its advantage; it still counts in the denominator. All tensors (B,T), log-probabilities
    in nats; a range of None sets no limit on that side. With `through_ratio` the gradient flows through f(ρ) too;
    without it f(ρ) is a constant, as in SAO, and the gradient is that of −ρ·A inside the range. `clip_fraction` counts
    the
    tokens left out. `aggregation` and `denominator` are those of `vantage.algorithms.aggregation.aggregate`.

    Raises ValueError as `clipped_surrogate`.
    """
    check_response_mask(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_clip_ranges(clip_range_low, clip_range_high, None)
    kept_logprobs = keep(logprobs, response_mask)
    log_ratio = kept_logprobs - keep(old_logprobs.detach(), response_mask)
    lowest, highest = log_range(clip_range_low, clip_range_high)
    is_out = (log_ratio <= lowest) | (log_ratio >= highest)  # a NaN stays inside, and shows
    # They are left out before the exponential, since an overflowing ratio times 0 would be NaN
    weight = torch.where(is_out, 0.0, log_ratio).exp() * ~is_out
    kept_advantages = keep(advantages.detach(), response_mask)
    return policy_loss_of(
        -(weight if through_ratio else weight.detach()) * kept_advantages * kept_logprobs,
        log_ratio.detach(),
        response_mask,
        clip_binds=is_out & (kept_advantages != 0),
        dual_clip_binds=torch.zeros_like(response_mask),
        aggregation=aggregation,
        denominator=denominator,
    )


def policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    aggregation: Aggregation,
    denominator: Denominator | None = None,
) -> PolicyLoss:
    """Return −log π · A, the loss of REINFORCE and A2C: without a ratio, so for one optimiser step on each rollout.

    All tensors (B,T), log-probabilities in nats; the gradient flows through `logprobs` only. `old_logprobs`
    enter only the metrics `ratio` and `approx_kl`, which show how far the policy was from the one that
    sampled; the clip metrics are 0. `aggregation` and `denominator` are those of
    `vantage.algorithms.aggregation.aggregate`.

    Raises ValueError for unequal shapes, and as `aggregate`.
    """
    check_response_mask(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    kept_logprobs = keep(logprobs, response_mask)
    nothing = torch.zeros_like(response_mask)
    return policy_loss_of(
        -kept_logprobs * keep(advantages.detach(), response_mask),
        kept_logprobs.detach() - keep(old_logprobs.detach(), response_mask),
        response_mask,
        clip_binds=nothing,
        dual_clip_binds=nothing,
        aggregation=aggregation,
        denominator=denominator,
    )


def policy_loss_of(
    per_token: Tensor,
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    clip_binds: Tensor,
    dual_clip_binds: Tensor,
    aggregation: Aggregation,
    denominator: Denominator | None,
) -> PolicyLoss:
    """Return the aggregated loss of tokens with the metrics of their ratios; `log_ratio` is detached."""
    return PolicyLoss(
        loss=aggregate(per_token, response_mask, aggregation=aggregation, denominator=denominator),
        clip_fraction=sum_count(clip_binds, response_mask),
        dual_clip_fraction=sum_count(dual_clip_binds, response_mask),
        approx_kl=sum_count(log_ratio.expm1() - log_ratio, response_mask),
        ratio=sum_count(log_ratio.exp(), response_mask),
        ratio_deviation=sum_count(log_ratio.expm1().abs(), response_mask),
        ratio_squared=sum_count((2 * log_ratio).exp(), response_mask),
    )


def positive_example_nll(
    logprobs: Tensor, response_mask: Tensor, is_positive: Tensor, *, denominator: Denominator | None = None
) -> PositiveExampleLoss:
    """Return −(Σ of logprobs over tokens of correct responses) / (their number): VAPO, arXiv 2504.05118 eq. 9-10.

    `logprobs` (B,T) in nats, `is_positive` (B,) boolean. `denominator` is the number of tokens of correct
    responses in the whole global minibatch, that is, `denominator_of(response_mask & is_positive[:, None],
    aggregation="token")` summed over it; None takes this call's. Without a correct response, loss and
    gradient are 0, whatever the denominator, even 0.

    Raises ValueError for unequal shapes or a denominator that is not positive while a response is correct,
    TypeError for a mask that is not boolean.
    """
    check_response_mask(response_mask, logprobs=logprobs)
    check_boolean("is_positive", is_positive)
    check_shape("is_positive", is_positive, (response_mask.shape[0],))
    positive_mask = response_mask & is_positive.unsqueeze(1)
    nll = -logprobs
    total = keep(nll, positive_mask).sum()
    # A number above 0 is valid in both cases. Checking a tensor makes the CPU wait for the GPU.
    if isinstance(denominator, (int, float)) and denominator > 0:
        total = total / denominator
    elif (num_positive_tokens := int(positive_mask.sum())) > 0:
        denominator = num_positive_tokens if denominator is None else denominator
        check_denominator(denominator)
        total = total / denominator
    return PositiveExampleLoss(loss=total, positive_nll=sum_count(nll, positive_mask))


def log_range(clip_range_low: float | None, clip_range_high: float | None) -> tuple[float, float]:
    """Return the logarithms of 1 − low and 1 + high; infinite on a side without a limit."""
    lowest = -math.inf if clip_range_low is None or clip_range_low == 1 else math.log1p(-clip_range_low)
    highest = math.inf if clip_range_high is None else math.log1p(clip_range_high)
    return lowest, highest


def check_clip_ranges(
    clip_range_low: float | None, clip_range_high: float | None, dual_clip: float | None
) -> None:
    for name, clip_range in (("clip_range_low", clip_range_low), ("clip_range_high", clip_range_high)):
        if clip_range is not None and not clip_range > 0:
            raise ValueError(f"{name}={clip_range} is not positive; use None for no clip on that side")
    if clip_range_low is not None and clip_range_low > 1:
        raise ValueError(
            f"clip_range_low={clip_range_low} is above 1, where it clips nothing; use None for no clip"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(
            f"dual_clip={dual_clip} is not above 1, where it would bind on every token of negative advantage; "
            "the paper uses 3, and None turns it off"
        )
