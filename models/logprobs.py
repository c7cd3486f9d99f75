"""Log-probabilities and entropies of response tokens, without ever holding logits of the whole batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from models.output_head import OutputHead, output_head, trunk
from models.sequences import Sequences

CHUNK_ELEMENTS = 2**23
"""Logits held at once when `chunk_tokens` is not given: 32 MiB of float32."""


@dataclass(frozen=True, eq=False)
class LogProbs:
    """What a policy says of the response tokens; 0 where `response_mask` is False."""

    logprobs: Tensor
    """(B, T) float32, nats: log π(token t | everything before it)."""
    entropy: Tensor | None
    """(B, T) float32, nats: exact over the vocabulary; None unless asked for."""


def response_logprobs(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    temperature: float,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> LogProbs:
    """Score each response token under softmax(logits / temperature), the distribution that `sample` draws from.

    One forward pass of the trunk; then logits of `chunk_tokens` valid response tokens at a time, computed again in
    the backward pass, so that no tensor has B·T·V elements. Differentiable once with respect to every parameter.

    Raises:
        ValueError: temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} is not above 0")
    hidden = trunk(model)(
        input_ids=sequences.input_ids, attention_mask=sequences.attention_mask, use_cache=False
    ).last_hidden_state
    rows, steps = sequences.response_mask.nonzero(as_tuple=True)
    hidden = hidden[rows, sequences.response_positions[rows, steps]]
    logprobs, entropy = token_logprobs(
        hidden,
        sequences.response_ids[rows, steps],
        output_head(model),
        temperature=temperature,
        with_entropy=with_entropy,
        chunk_tokens=chunk_tokens,
    )

    def spread(values: Tensor) -> Tensor:
        zeros = values.new_zeros(sequences.response_mask.shape)
        return zeros.index_put((rows, steps), values)

    return LogProbs(spread(logprobs), spread(entropy) if with_entropy else None)


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: OutputHead,
    *,
    temperature: float,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N,) of `targets` (N,) given hidden states (N, H), and entropies (N,) (zeros unless asked).

    Logits come in the weights' type (or autocast's) as the model itself would give them; what follows is float32.
    """
    weight, bias, device = head.weight, head.bias, hidden.device.type
    if torch.is_autocast_enabled(device):
        # cast here, where autograd sees it: inside the function below there is no autocast
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_ELEMENTS // weight.shape[0])
    return _ChunkedLogProbs.apply(
        hidden, weight, bias, targets, head.scale, head.softcap, temperature, with_entropy, chunk_tokens
    )


class _ChunkedLogProbs(torch.autograd.Function):
    """z = cap·tanh(scale·(W·h + b)/cap) / temperature;  log p(a) = z_a − lse(z);  H = lse(z) − Σ p·z."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        temperature: float,
        with_entropy: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.settings = scale, softcap, temperature, with_entropy, chunk_tokens
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        normaliser = torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(len(targets), chunk_tokens):
                logits, _ = _logits(hidden[chunk], weight, bias, scale, softcap, temperature)
                normaliser[chunk] = logits.logsumexp(dim=-1)
                logprobs[chunk] = logits.gather(1, targets[chunk, None])[:, 0] - normaliser[chunk]
                if with_entropy:
                    probabilities = (logits - normaliser[chunk, None]).exp_()
                    entropy[chunk] = normaliser[chunk] - probabilities.mul_(logits).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        scale, softcap, temperature, with_entropy, chunk_tokens = ctx.settings
        dtype = normaliser.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # sums over chunks are kept in float32 even where the weights are not
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(len(targets), chunk_tokens):
                logits, slope = _logits(hidden[chunk], weight, bias, scale, softcap, temperature)
                log_p = logits.sub_(normaliser[chunk, None])
                p = log_p.exp()
                # d log p(a) / dz = 1[a] − p ;  dH / dz = −p·(log p + H)
                if with_entropy:
                    coefficient = log_p.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None])
                    grad = p.mul_(coefficient.add_(grad_logprobs[chunk, None])).neg_()
                else:
                    grad = p.mul_(-grad_logprobs[chunk, None])
                grad.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
                grad = grad.mul_(scale / temperature if slope is None else slope.mul_(scale / temperature))
                grad = grad.to(weight.dtype)
                if grad_hidden is not None:
                    grad_hidden[chunk] = grad @ weight
                if grad_weight is not None:
                    _add_product(grad_weight, grad.T, hidden[chunk])
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *[None] * 6,
        )


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> tuple[Tensor, Tensor | None]:
    """Logits (n, V) over the temperature, and with a cap the derivative of capping (n, V)."""
    logits = linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(scale)
    if softcap is None:
        return logits.div_(temperature), None
    tanh = logits.div_(softcap).tanh_()
    return tanh * (softcap / temperature), 1 - tanh.square()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place and without a second (V, H) tensor where the types allow it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]
