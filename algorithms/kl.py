"""KL divergences per token: estimated from sampled tokens, or exact over the vocabulary; and controllers of their coefficient.

There are two divergences: KL(π‖ref) from tokens that π sampled, and KL(old‖new) from tokens that old
sampled. Each has its own controller, with its own units.
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from vantage.algorithms.masking import keep

KLEstimator: TypeAlias = Literal["k1", "abs", "k2", "k3"]
OldKLKind: TypeAlias = Literal["k1", "k3"]

ROUNDING_STEPS = 64
"""Log-ratios up to this multiple of the relative rounding of their type count as 0: 8e-6 nats in float32."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLEstimator) -> Tensor:
    """Estimate KL(π‖ref) on each sampled token, in nats; with Δ = logprobs − ref_logprobs:

        k1  Δ               unbiased, either sign; the estimate for rewards. As a loss its expected gradient is 0
        abs |Δ|             biased; its gradient is that of `distance`
        k2  ½Δ²             biased; as a loss its expected gradient is that of KL(π‖ref)
        k3  e^(−Δ) − 1 + Δ  unbiased, ≥ 0; as a loss its expected gradient is that of KL(ref‖π)

    (John Schulman, "Approximating KL divergence", 2020.) Any shape, elementwise, float32 or better; the
    gradient flows through `logprobs` only. There is no mask here, so an estimate that is not finite keeps its
    value and passes a gradient of 0: at a masked position the caller's `where` then removes it completely, and
    at a response token the loss shows it.

    Raises ValueError for an unknown kind or unequal shapes.
    """
    _check_kind(kind, get_args(KLEstimator))
    return _estimate_where_finite(_log_ratio(logprobs, "ref_logprobs", ref_logprobs), kind)


def old_kl_estimate(logprobs: Tensor, old_logprobs: Tensor, *, kind: OldKLKind) -> Tensor:
    """Estimate KL(old‖new) on each token that **old** sampled, in nats; with ℓ = logprobs − old_logprobs:

        k1  −ℓ           unbiased, either sign
        k3  e^ℓ − 1 − ℓ  unbiased, ≥ 0

    Since old sampled, the expected gradient of both is that of KL(old‖new). They are the estimates of
    `kl_estimate` with Δ = −ℓ. Exchanging its arguments, Δ = ℓ, would give other estimates. Shapes,
    precision, gradient, non-finite estimates and errors are as for `kl_estimate`.
    """
    _check_kind(kind, get_args(OldKLKind))
    return _estimate_where_finite(-_log_ratio(logprobs, "old_logprobs", old_logprobs), kind)


def distance(log_ratio: Tensor) -> Tensor:
    """Return |Δ|, whose gradient is 0 where Δ is only rounding: |Δ| ≤ ROUNDING_STEPS · ε of its type.

    Two passes over the same weights differ in their last bits. The sign of such a difference is random, but would give
    a gradient as large as that of any other token.
    """
    is_apart = log_ratio.detach().abs() > ROUNDING_STEPS * torch.finfo(log_ratio.dtype).eps
    return torch.where(is_apart, log_ratio, log_ratio.detach()).abs()


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Return KL(π‖ref) = Σ_v π(v)·(log π(v) − log π_ref(v)) over the vocabulary, in nats: exact for each state.

    `logits`, `ref_logits` (..., V), not necessarily normalised → (...) in float32 or better, ≥ 0 up to
    rounding; the gradient flows through `logits` only. An entry that π gives no probability (a logit of −inf)
    contributes 0. A state whose KL is not finite keeps its value and passes a gradient of 0, as in
    `kl_estimate`. It holds several tensors of the size of `logits`: call it on some positions at a time.

    Raises ValueError for unequal shapes.
    """
    _check_same_shape("logits", logits, "ref_logits", ref_logits)
    ref_logits = ref_logits.detach()
    kl = _sum_over_vocabulary(logits, ref_logits)
    finite = torch.isfinite(kl.detach())
    if bool(finite.all()):
        return kl
    is_finite = finite.unsqueeze(-1)
    without = _sum_over_vocabulary(keep(logits, is_finite), keep(ref_logits, is_finite))
    return torch.where(finite, without, kl.detach())


@dataclass(frozen=True)
class ProportionalController:
    """The adaptive β of Ziegler et al., arXiv 1909.08593 §2.2, for the penalty −β·KL(π‖ref) in the reward.

    `coef`: β, in reward per nat. `target`: nats **per response** (6 in the paper; a mean per token, which some
    implementations take, is smaller by the response's length). `horizon`: responses (10,000 in the paper).

    Raises ValueError for one that is not positive and finite.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        _check_positive(coef=self.coef, target=self.target, horizon=self.horizon)

    def update(self, kl: float, *, num_sequences: int) -> "ProportionalController":
        """Return the controller with β·(1 + clip(kl/target − 1, −0.2, 0.2) · num_sequences/horizon) as its β.

        The paper has a constant gain of 0.1; its code has num_sequences/horizon instead.
        `kl` is the batch mean of each response's sum of k1 over its tokens, in nats per response;
        `num_sequences` the responses sampled since the last update.

        Raises ValueError for a KL that is not finite, and for a number of responses that is not positive, or
        of 5 horizons or more, since one step could then make β 0 or negative.
        """
        _check_finite_kl(kl)
        if not 0 < 0.2 * num_sequences < self.horizon:
            raise ValueError(
                f"num_sequences={num_sequences} must be positive and below 5 · horizon={self.horizon:g}, or β "
                "could turn negative; raise the horizon"
            )
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=_representable(self.coef * (1 + error * num_sequences / self.horizon)))


@dataclass(frozen=True)
class PenaltyController:
    """The adaptive β of PPO, arXiv 1707.06347 §4, for the loss β·KL(old‖new).

    `coef`: β, in loss per nat. `target`: nats **per token**.

    Raises ValueError for one that is not positive and finite.
    """

    coef: float
    target: float

    def __post_init__(self) -> None:
        _check_positive(coef=self.coef, target=self.target)

    def update(self, kl: float) -> "PenaltyController":
        """Return the controller with twice β if kl > 1.5·target, with half of β if kl < target/1.5, else unchanged.

        `kl` is the mean of KL(old‖new) over the tokens of the rollout after its updates, in nats per token.

        Raises ValueError for a KL that is not finite.
        """
        _check_finite_kl(kl)
        if kl > 1.5 * self.target:
            return replace(self, coef=_representable(2 * self.coef))
        if kl < self.target / 1.5:
            return replace(self, coef=_representable(self.coef / 2))
        return self


def _log_ratio(logprobs: Tensor, other_name: str, other: Tensor) -> Tensor:
    """Return logprobs − other in float32 or better, differentiable in `logprobs` only."""
    _check_same_shape("logprobs", logprobs, other_name, other)
    precise = torch.promote_types(torch.promote_types(logprobs.dtype, other.dtype), torch.float32)
    return logprobs.to(precise) - other.detach().to(precise)


def _estimate_where_finite(log_ratio: Tensor, kind: str) -> Tensor:
    """Return the estimate, with a gradient of 0 where it is not finite."""
    value = _estimate(log_ratio.detach(), kind)
    finite = torch.isfinite(value)
    return torch.where(finite, _estimate(torch.where(finite, log_ratio, 0.0), kind), value)


def _estimate(log_ratio: Tensor, kind: str) -> Tensor:
    """Estimate KL by Δ = log of the sampling policy − log of the other."""
    if kind == "k1":
        return log_ratio
    if kind == "abs":
        return distance(log_ratio)
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio  # expm1: e^x − 1 loses every digit near Δ = 0


def _sum_over_vocabulary(logits: Tensor, ref_logits: Tensor) -> Tensor:
    precise = torch.promote_types(torch.promote_types(logits.dtype, ref_logits.dtype), torch.float32)
    logprobs = torch.log_softmax(logits.to(precise), dim=-1)
    ref_logprobs = torch.log_softmax(ref_logits.to(precise), dim=-1)
    # 0 · log 0 is 0, but −inf − (−inf) is NaN. Selecting before the product keeps the NaN out of the gradient.
    log_ratio = torch.where(logprobs == -torch.inf, 0.0, logprobs - ref_logprobs)
    return (logprobs.exp() * log_ratio).sum(dim=-1)


def _representable(coef: float) -> float:
    """Bound β, which changes by factors: after a thousand steps in one direction it would stay 0 or infinity."""
    return min(max(coef, sys.float_info.min), sys.float_info.max)


def _check_kind(kind: str, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise ValueError(
            f"kind={kind!r} is not an estimate from sampled tokens; use one of {', '.join(known)}"
        )


def _check_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.shape != other.shape:
        raise ValueError(
            f"{other_name} has shape {tuple(other.shape)}; it must be that of {name}, {tuple(tensor.shape)}"
        )


def _check_positive(**settings: float) -> None:
    for name, value in settings.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} is not a positive, finite number")


def _check_finite_kl(kl: float) -> None:
    if not math.isfinite(kl):
        raise ValueError(
            f"kl={kl} is not finite: no coefficient follows from it; look at the log-probabilities it came from"
        )
