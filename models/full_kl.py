"""KL divergence over the whole vocabulary between a policy and a reference, without logits of the whole batch."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.chunked_logits import HeadGradients, default_chunk_tokens, in_autocast_type, logits_and_slope
from models.chunks import chunks
from models.output_head import OutputHead


def token_full_kl(
    hidden: Tensor,
    head: OutputHead,
    ref_hidden: Tensor,
    ref_head: OutputHead,
    *,
    temperature: float,
    chunk_tokens: int | None = None,
) -> Tensor:
    """KL(π‖ref) = Σ_v π(v)·(log π(v) − log ref(v)) in nats (N,), from hidden states (N, H) and (N, H') of the two.

    Both distributions are softmax(logits / temperature) over the same V tokens. Logits of `chunk_tokens` tokens are
    held at a time and computed again in the backward pass. Differentiable once, and with respect to the policy only.
    """
    hidden, head = in_autocast_type(hidden, head)
    ref_hidden, ref_head = in_autocast_type(ref_hidden, ref_head)
    return _ChunkedFullKL.apply(
        hidden,
        head.weight,
        head.bias,
        ref_hidden.detach(),
        ref_head.weight.detach(),
        None if ref_head.bias is None else ref_head.bias.detach(),
        (head.scale, head.softcap),
        (ref_head.scale, ref_head.softcap),
        temperature,
        default_chunk_tokens(head) if chunk_tokens is None else chunk_tokens,
    )


class _ChunkedFullKL(torch.autograd.Function):
    """KL = Σ_v p_v·(log p_v − log q_v);  dKL/dz_v = p_v·(log p_v − log q_v − KL)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        ref_bias: Tensor | None,
        scaling: tuple[float, float | None],  # (scale, softcap)
        ref_scaling: tuple[float, float | None],
        temperature: float,
        chunk_tokens: int,
    ) -> Tensor:
        ctx.settings = scaling, ref_scaling, temperature, chunk_tokens
        head, ref_head = OutputHead(weight, bias, *scaling), OutputHead(ref_weight, ref_bias, *ref_scaling)
        kl = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in chunks(len(hidden), chunk_tokens):
                log_p, _ = _log_probabilities(hidden[chunk], head, temperature)
                log_q, _ = _log_probabilities(ref_hidden[chunk], ref_head, temperature)
                log_ratio = torch.sub(log_p, log_q, out=log_q)
                kl[chunk] = log_p.exp_().mul_(log_ratio).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, ref_hidden, ref_weight, ref_bias, kl)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, kl = ctx.saved_tensors
        scaling, ref_scaling, temperature, chunk_tokens = ctx.settings
        head, ref_head = OutputHead(weight, bias, *scaling), OutputHead(ref_weight, ref_bias, *ref_scaling)
        gradients = HeadGradients(hidden, head, needs=ctx.needs_input_grad[:3], dtype=kl.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in chunks(len(hidden), chunk_tokens):
                log_p, slope = _log_probabilities(hidden[chunk], head, temperature)
                log_q, _ = _log_probabilities(ref_hidden[chunk], ref_head, temperature)
                coefficient = torch.sub(log_p, log_q, out=log_q).sub_(kl[chunk, None])
                coefficient.mul_(grad_kl[chunk, None])
                gradients.add(chunk, log_p.exp_().mul_(coefficient), slope)
        return (*gradients.result(), *[None] * 7)


def _log_probabilities(hidden: Tensor, head: OutputHead, temperature: float) -> tuple[Tensor, Tensor | float]:
    """log softmax (n, V) of the logits over the temperature, and the slope of `logits_and_slope`."""
    logits, slope = logits_and_slope(hidden, head, temperature)
    return logits.sub_(logits.logsumexp(dim=-1, keepdim=True)), slope
