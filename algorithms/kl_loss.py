"""KL penalties as terms of the loss: they hold the policy near its reference, or near the policy that sampled."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from vantage.algorithms.aggregation import Aggregation, Denominator, aggregate
from vantage.algorithms.kl import OldKLKind, kl_estimate, old_kl_estimate
from vantage.algorithms.masking import check_response_mask, keep
from vantage.algorithms.metrics import SumCount, sum_count

KLLossKind: TypeAlias = Literal["abs", "k2", "k3"]
UnbiasedKLKind: TypeAlias = Literal["k1", "k3"]
"""Estimators whose expectation is the KL, so that with the gradient through the ratio theirs is the KL's gradient."""


@dataclass(frozen=True)
class KLLoss:
    """`loss` is 0-d and differentiable; `kl_loss` has the terms of the loss over valid tokens, in nats."""

    loss: Tensor
    kl_loss: SumCount


@dataclass(frozen=True)
class OldKLLoss:
    """`loss` is 0-d and differentiable; `old_kl` is KL(old‖new) over valid tokens, in nats."""

    loss: Tensor
    old_kl: SumCount


def reference_kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    *,
    kind: KLLossKind | UnbiasedKLKind,
    aggregation: Aggregation,
    through_ratio: bool = False,
    denominator: Denominator | None = None,
) -> KLLoss:
    """Return the loss ρ·kl_estimate(logprobs, ref_logprobs), ρ = exp(logprobs − old_logprobs), detached or not.

    All tensors (B,T), log-probabilities in nats; the gradient flows through `logprobs` only. ρ corrects for
    tokens that the old policy sampled instead of π. If ρ is detached, the loss's expected gradient is that of KL(π‖ref)
    for k2, that of KL(ref‖π) for k3 (GRPO, arXiv 2402.03300 eq. 4, there without ρ), and neither of them for abs. With
    `through_ratio` it is that of KL(π‖ref) on each token, for k1 and k3, whose expectation is that KL (arXiv
    2506.09477): Σ_v π(v)·k(v) is differentiated in both factors. No such loss contains the effect of a token on the KL
    of later tokens; the penalty of the reward does. `aggregation` and `denominator` are those of
    `vantage.algorithms.aggregation.aggregate`.

    Raises ValueError for other kinds, unequal shapes, and as `aggregate`.
    """
    _check_kind(kind, through_ratio=through_ratio)
    check_response_mask(
        response_mask, logprobs=logprobs, ref_logprobs=ref_logprobs, old_logprobs=old_logprobs
    )
    kept_logprobs = keep(logprobs, response_mask)
    ratio = (kept_logprobs - keep(old_logprobs.detach(), response_mask)).exp()
    ratio = ratio if through_ratio else ratio.detach()
    per_token = ratio * kl_estimate(kept_logprobs, keep(ref_logprobs, response_mask), kind=kind)
    return exact_kl_loss(per_token, response_mask, aggregation=aggregation, denominator=denominator)


def exact_kl_loss(
    kl: Tensor, response_mask: Tensor, *, aggregation: Aggregation, denominator: Denominator | None = None
) -> KLLoss:
    """Return the loss of a KL (B,T) that is exact at each position, `vantage.algorithms.kl.full_kl`, in nats.

    There is no ρ: the sum over the vocabulary is already under π. (The visited states are those of the old
    policy, as in the clipped surrogate.) `aggregation` and `denominator` are those of
    `vantage.algorithms.aggregation.aggregate`.

    Raises ValueError for unequal shapes, and as `aggregate`.
    """
    check_response_mask(response_mask, kl=kl)
    return KLLoss(
        loss=aggregate(kl, response_mask, aggregation=aggregation, denominator=denominator),
        kl_loss=sum_count(kl, response_mask),
    )


def old_kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    *,
    kind: OldKLKind,
    aggregation: Aggregation,
    denominator: Denominator | None = None,
) -> OldKLLoss:
    """Return the loss KL(old‖new) by `vantage.algorithms.kl.old_kl_estimate`: the penalty of PPO, arXiv 1707.06347 eq. 8.

    All tensors (B,T), log-probabilities in nats; the gradient flows through `logprobs` only. There is no
    ρ: old sampled, and the expectation is under old. `aggregation` and `denominator` are those of
    `vantage.algorithms.aggregation.aggregate`.

    Raises ValueError for an unknown kind, unequal shapes, and as `aggregate`.
    """
    check_response_mask(response_mask, logprobs=logprobs, old_logprobs=old_logprobs)
    per_token = old_kl_estimate(keep(logprobs, response_mask), keep(old_logprobs, response_mask), kind=kind)
    return OldKLLoss(
        loss=aggregate(per_token, response_mask, aggregation=aggregation, denominator=denominator),
        old_kl=sum_count(per_token, response_mask),
    )


def _check_kind(kind: str, *, through_ratio: bool) -> None:
    if through_ratio:
        if kind not in get_args(UnbiasedKLKind):
            known = " or ".join(get_args(UnbiasedKLKind))
            raise ValueError(
                f"kind={kind!r} has another expectation than KL(π‖ref), so the gradient through the ratio is not the KL's; "
                f"use {known}"
            )
        return
    if kind == "k1":
        raise ValueError(
            "kind='k1' has an expected gradient of 0, so as a loss it only adds noise; use k2 (the gradient of "
            "KL(π‖ref)) or k3 (that of KL(ref‖π)), or put k1 into the reward, where it belongs"
        )
    if kind not in get_args(KLLossKind):
        known = ", ".join(get_args(KLLossKind))
        raise ValueError(f"kind={kind!r} is no loss on sampled tokens; use one of {known}, or exact_kl_loss")
