"""Per-token estimates of KL(π‖ref) from tokens that π sampled."""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

KLKind: TypeAlias = Literal["k1", "abs", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLKind) -> Tensor:
    """Estimate KL(π‖ref) on each sampled token, in nats; with Δ = logprobs − ref_logprobs:

        k1  Δ               unbiased, either sign; the one for rewards. As a loss its expected gradient is 0
        abs |Δ|             biased
        k2  ½Δ²             biased; as a loss its expected gradient is that of KL(π‖ref)
        k3  e^(−Δ) − 1 + Δ  unbiased, ≥ 0; as a loss its expected gradient is that of KL(ref‖π)

    (John Schulman, "Approximating KL divergence", 2020.) Any shape, elementwise, float32 or better; the
    gradient flows through `logprobs` only. There is no mask here, so an estimate that is not finite keeps its
    value and passes a gradient of 0: at a masked position the caller's `where` then removes every trace of
    it, and at a response token the loss shows it.

    Raises ValueError for an unknown kind or unequal shapes.
    """
    if kind not in get_args(KLKind):
        known = ", ".join(get_args(KLKind))
        raise ValueError(f"kind={kind!r} is not an estimate from sampled tokens; use one of {known}")
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"ref_logprobs has shape {tuple(ref_logprobs.shape)}; "
            f"it must be that of logprobs, {tuple(logprobs.shape)}"
        )
    precise = torch.promote_types(torch.promote_types(logprobs.dtype, ref_logprobs.dtype), torch.float32)
    log_ratio = logprobs.to(precise) - ref_logprobs.detach().to(precise)
    value = _estimate(log_ratio.detach(), kind)
    finite = torch.isfinite(value)
    return torch.where(finite, _estimate(torch.where(finite, log_ratio, 0.0), kind), value)


def _estimate(log_ratio: Tensor, kind: KLKind) -> Tensor:
    if kind == "k1":
        return log_ratio
    if kind == "abs":
        return log_ratio.abs()
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio  # expm1: e^x − 1 loses every digit near Δ = 0
