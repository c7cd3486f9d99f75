"""Compute log-probabilities of response tokens, entropies and KL, without holding the logits of a whole batch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from vantage.models.chunked_logits import (
    KEPT_ELEMENTS,
    HeadGradients,
    default_chunk_tokens,
    in_autocast_type,
    logits_and_slope,
)
from vantage.models.chunks import chunks
from vantage.models.output_head import OutputHead, output_head, trunk
from vantage.models.pass_counts import count_logits
from vantage.models.scalar_head import read_scalars
from vantage.models.sequences import Sequences
from vantage.models.token_states import token_states


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Results at response tokens, in float32: (B, T), 0 where `response_mask` is False; or (N,) for N tokens."""

    logprobs: Tensor
    """Nats: log π(token t | everything before it)."""
    entropy: Tensor | None = None
    """Nats: exact over the vocabulary; None unless asked for."""
    full_kl: Tensor | None = None
    """Nats: KL(π‖reference) exact over the vocabulary; None without a reference."""
    ref_logprobs: Tensor | None = None
    """Nats: the reference's log-probabilities of the same tokens, without a gradient; None without a reference."""
    values: Tensor | None = None
    """V_t, read at the position of the logits of token t; None without a value head."""
    final_values: Tensor | None = None
    """(B,): the value of each whole response, read at its last token; None unless asked for."""


def response_logprobs(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    temperature: float,
    with_entropy: bool = False,
    reference: PreTrainedModel | None = None,
    value_head: nn.Linear | None = None,
    with_final_values: bool = False,
    chunk_tokens: int | None = None,
) -> LogProbs:
    """Score each response token under softmax(logits / temperature), the distribution that `sample` draws from.

    This takes one forward pass of the trunk, then logits of `chunk_tokens` valid response tokens at a time, so that no
    tensor has B·T·V elements. If they are more than `KEPT_ELEMENTS` in all, the backward pass computes them again. The
    result is differentiable once with respect to every parameter.

    With a `reference`, also return Σ_v π(v)·(log π(v) − log π_ref(v)) at each token, both under the temperature; no
    gradient reaches the reference. With a `value_head`, also return its values from the policy's own last hidden
    states, with gradients to head and trunk; `with_final_values`, at the last token of each response too.

    Raises:
        ValueError: temperature is not above 0, or the reference has another number of logits than the policy.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} is not above 0")
    if reference is not None:
        _check_same_vocabulary(model, reference)
    rows, steps = sequences.response_tokens()
    places = sequences.places(rows, sequences.response_positions[rows, steps])
    states = token_states(trunk(model), sequences)
    hidden = states[places]
    of_reference = None
    if reference is not None:
        with torch.no_grad():
            of_reference = token_states(trunk(reference), sequences)[places], output_head(reference)
    found = token_logprobs(
        hidden,
        sequences.response_ids[rows, steps],
        output_head(model),
        temperature=temperature,
        with_entropy=with_entropy,
        reference=of_reference,
        chunk_tokens=chunk_tokens,
    )
    if value_head is not None:
        found = replace(found, values=read_scalars(hidden, value_head))

    def spread(tokens: Tensor) -> Tensor:
        zeros = tokens.new_zeros(sequences.response_mask.shape)
        return zeros.index_put((rows, steps), tokens)

    spread_out = {name: spread(tokens) for name, tokens in vars(found).items() if tokens is not None}
    if value_head is not None and with_final_values:
        every = torch.arange(len(sequences), device=states.device)
        ends = sequences.places(every, sequences.last_positions)
        spread_out["final_values"] = read_scalars(states[ends], value_head)
    return LogProbs(**spread_out)


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: OutputHead,
    *,
    temperature: float,
    with_entropy: bool = False,
    reference: tuple[Tensor, OutputHead] | None = None,
    chunk_tokens: int | None = None,
) -> LogProbs:
    """Return `LogProbs` without values, (N,) each, of `targets` (N,) from hidden states (N, H) and their head.

    Logits have the weights' type (or autocast's) as in the model itself; later computations are in float32.

    Args:
        reference: hidden states (N, H') of another model at the same tokens, and its head over the same V tokens.
    """
    hidden, head = in_autocast_type(hidden, head)
    if reference is not None:
        with torch.no_grad():
            reference = in_autocast_type(*reference)
    learns = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    logprobs, entropy, full_kl, ref_logprobs = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden,
        head.weight,
        head.bias,
        targets,
        reference,
        (head.scale, head.softcap),
        temperature,
        with_entropy,
        default_chunk_tokens(head) if chunk_tokens is None else chunk_tokens,
        learns and (1 if reference is None else 2) * len(targets) * len(head.weight) <= KEPT_ELEMENTS,
    )
    return LogProbs(
        logprobs,
        entropy=entropy if with_entropy else None,
        full_kl=None if reference is None else full_kl,
        ref_logprobs=None if reference is None else ref_logprobs,
    )


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities, entropies and KL in chunks, from z of `logits_and_slope`:

    log p = z − lse(z);  H = lse(z) − Σ p·z;  KL = Σ p·(log p − log q)

    d log p(a)/dz = 1[a] − p;  dH/dz = −p·(log p + H);  dKL/dz = p·(log p − log q − KL).  q is frozen: it comes in a
    tuple, into which autograd does not look.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        reference: tuple[Tensor, OutputHead] | None,
        scaling: tuple[float, float | None],  # (scale, softcap)
        temperature: float,
        with_entropy: bool,
        chunk_tokens: int,
        keeps_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.kept = []
        ctx.settings = reference, scaling, temperature, with_entropy, chunk_tokens
        head = OutputHead(weight, bias, *scaling)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        normaliser = torch.empty_like(logprobs)
        entropy, full_kl, ref_logprobs = (torch.zeros_like(logprobs) for _ in range(3))
        count_logits(len(targets))
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in chunks(len(targets), chunk_tokens):
                logits, slope = logits_and_slope(hidden[chunk], head, temperature)
                log_q = None if reference is None else _log_probabilities(reference, chunk, temperature)
                if keeps_logits:
                    ctx.kept.append((logits, slope, log_q))
                normaliser[chunk] = logits.logsumexp(dim=-1)
                logprobs[chunk] = logits.gather(1, targets[chunk, None])[:, 0] - normaliser[chunk]
                if not with_entropy and log_q is None:
                    continue
                log_p = logits - normaliser[chunk, None]
                if log_q is not None:
                    ref_logprobs[chunk] = log_q.gather(1, targets[chunk, None])[:, 0]
                    log_ratio = torch.sub(log_p, log_q, out=None if keeps_logits else log_q)
                p = log_p.exp_()
                if log_q is not None:
                    full_kl[chunk] = log_ratio.mul_(p).sum(dim=-1)
                if with_entropy:
                    entropy[chunk] = normaliser[chunk] - p.mul_(logits).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy, full_kl)
        ctx.mark_non_differentiable(ref_logprobs)
        return logprobs, entropy, full_kl, ref_logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_kl: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy, full_kl = ctx.saved_tensors
        reference, scaling, temperature, with_entropy, chunk_tokens = ctx.settings
        head = OutputHead(weight, bias, *scaling)
        gradients = HeadGradients(hidden, head, needs=ctx.needs_input_grad[:3], dtype=normaliser.dtype)
        if not ctx.kept:
            count_logits(len(targets), again=True)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in chunks(len(targets), chunk_tokens):
                if ctx.kept:
                    logits, slope, log_q = ctx.kept.pop(0)
                else:
                    logits, slope = logits_and_slope(hidden[chunk], head, temperature)
                    log_q = None if reference is None else _log_probabilities(reference, chunk, temperature)
                log_p = logits.sub_(normaliser[chunk, None])
                p = log_p.exp()
                # The sum of the factors of p in the three gradients
                factor = -grad_logprobs[chunk, None]
                if log_q is not None:
                    centred = torch.sub(log_p, log_q, out=log_q).sub_(full_kl[chunk, None])
                    factor = centred.mul_(grad_kl[chunk, None]).add_(factor)
                if with_entropy:
                    centred = log_p.add_(entropy[chunk, None])
                    factor = centred.mul_(-grad_entropy[chunk, None]).add_(factor)
                grad = p.mul_(factor)
                grad.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
                gradients.add(chunk, grad, slope)
        return (*gradients.result(), *[None] * 7)


def _log_probabilities(model: tuple[Tensor, OutputHead], chunk: slice, temperature: float) -> Tensor:
    """Return log softmax (n, V) of the logits over the temperature, of a chunk of a model's hidden states."""
    hidden, head = model
    logits, _ = logits_and_slope(hidden[chunk], head, temperature)
    return logits.sub_(logits.logsumexp(dim=-1, keepdim=True))


def _check_same_vocabulary(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    size, ref_size = (len(output_head(each).weight) for each in (model, reference))
    if size != ref_size:
        raise ValueError(
            f"the policy {_name(model)} has {size} logits a token and the reference {_name(reference)} has {ref_size}; "
            "full KL sums over one vocabulary: take a reference with the policy's tokenizer and embedding size"
        )


def _name(model: PreTrainedModel) -> str:
    return model.name_or_path or type(model).__name__
