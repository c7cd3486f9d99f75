"""What a policy says of response tokens, without ever holding logits of the whole batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from models.chunked_logits import HeadGradients, default_chunk_tokens, in_autocast_type, logits_and_slope
from models.chunks import chunks
from models.full_kl import token_full_kl
from models.output_head import OutputHead, output_head, trunk
from models.scalar_head import read_scalars
from models.sequences import Sequences


@dataclass(frozen=True, eq=False)
class LogProbs:
    """What a policy says of the response tokens; 0 where `response_mask` is False."""

    logprobs: Tensor
    """(B, T) float32, nats: log π(token t | everything before it)."""
    entropy: Tensor | None
    """(B, T) float32, nats: exact over the vocabulary; None unless asked for."""
    full_kl: Tensor | None = None
    """(B, T) float32, nats: KL(π‖reference) exact over the vocabulary; None without a reference."""
    values: Tensor | None = None
    """(B, T) float32: V_t read where the logits of token t are; None without a value head."""


def response_logprobs(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    temperature: float,
    with_entropy: bool = False,
    reference: PreTrainedModel | None = None,
    value_head: nn.Linear | None = None,
    chunk_tokens: int | None = None,
) -> LogProbs:
    """Score each response token under softmax(logits / temperature), the distribution that `sample` draws from.

    One forward pass of the trunk; then logits of `chunk_tokens` valid response tokens at a time, computed again in
    the backward pass, so that no tensor has B·T·V elements. Differentiable once with respect to every parameter.

    With a `reference`, also Σ_v π(v)·(log π(v) − log π_ref(v)) at each token, both under the temperature; no gradient
    reaches the reference. With a `value_head`, also what it reads from the policy's own last hidden states, with
    gradients to head and trunk.

    Raises:
        ValueError: temperature is not above 0, or the reference has another number of logits than the policy.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} is not above 0")
    if reference is not None:
        _check_same_vocabulary(model, reference)
    rows, steps = sequences.response_mask.nonzero(as_tuple=True)
    places = rows, sequences.response_positions[rows, steps]
    hidden = _hidden_states(model, sequences)[places]
    logprobs, entropy = token_logprobs(
        hidden,
        sequences.response_ids[rows, steps],
        output_head(model),
        temperature=temperature,
        with_entropy=with_entropy,
        chunk_tokens=chunk_tokens,
    )
    full_kl = None
    if reference is not None:
        with torch.no_grad():
            ref_hidden = _hidden_states(reference, sequences)[places]
        full_kl = token_full_kl(
            hidden,
            output_head(model),
            ref_hidden,
            output_head(reference),
            temperature=temperature,
            chunk_tokens=chunk_tokens,
        )
    values = None if value_head is None else read_scalars(hidden, value_head)

    def spread(tokens: Tensor) -> Tensor:
        zeros = tokens.new_zeros(sequences.response_mask.shape)
        return zeros.index_put((rows, steps), tokens)

    return LogProbs(
        logprobs=spread(logprobs),
        entropy=spread(entropy) if with_entropy else None,
        full_kl=None if full_kl is None else spread(full_kl),
        values=None if values is None else spread(values),
    )


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
    hidden, head = in_autocast_type(hidden, head)
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(head)
    return _ChunkedLogProbs.apply(
        hidden,
        head.weight,
        head.bias,
        targets,
        head.scale,
        head.softcap,
        temperature,
        with_entropy,
        chunk_tokens,
    )


class _ChunkedLogProbs(torch.autograd.Function):
    """With z of `logits_and_slope`: log p(a) = z_a − lse(z);  H = lse(z) − Σ p·z."""

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
        head = OutputHead(weight, bias, scale, softcap)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        normaliser = torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in chunks(len(targets), chunk_tokens):
                logits, _ = logits_and_slope(hidden[chunk], head, temperature)
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
        head = OutputHead(weight, bias, scale, softcap)
        gradients = HeadGradients(hidden, head, needs=ctx.needs_input_grad[:3], dtype=normaliser.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in chunks(len(targets), chunk_tokens):
                logits, slope = logits_and_slope(hidden[chunk], head, temperature)
                log_p = logits.sub_(normaliser[chunk, None])
                p = log_p.exp()
                # d log p(a) / dz = 1[a] − p ;  dH / dz = −p·(log p + H)
                if with_entropy:
                    coefficient = log_p.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None])
                    grad = p.mul_(coefficient.add_(grad_logprobs[chunk, None])).neg_()
                else:
                    grad = p.mul_(-grad_logprobs[chunk, None])
                grad.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
                gradients.add(chunk, grad, slope)
        return (*gradients.result(), *[None] * 6)


def _hidden_states(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Last hidden states (B, L, H) of the trunk."""
    output = trunk(model)(
        input_ids=sequences.input_ids, attention_mask=sequences.attention_mask, use_cache=False
    )
    return output.last_hidden_state


def _check_same_vocabulary(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    size, ref_size = (len(output_head(each).weight) for each in (model, reference))
    if size != ref_size:
        raise ValueError(
            f"the policy {_name(model)} has {size} logits a token and the reference {_name(reference)} has {ref_size}; "
            "full KL sums over one vocabulary: take a reference with the policy's tokenizer and embedding size"
        )


def _name(model: PreTrainedModel) -> str:
    return model.name_or_path or type(model).__name__
