"""The head that reads one scalar per position from hidden states."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vantage.schemas.recipe.critic_head import CriticHead

INITIAL_SCALAR_STD = 0.1
"""Spread of a new head's outputs: small beside a reward of 1. Hidden states leave the last norm with entries of
about 1, so its weights have this over √H."""


def read_scalars(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Return scalars (...) that `head` reads from hidden states (..., H), in the head's type, which is float32.

    For a head with several outputs, return their mean.
    """
    outputs = read_outputs(hidden, head)
    return outputs[..., 0] if outputs.shape[-1] == 1 else outputs.mean(dim=-1)


def read_outputs(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Return all outputs (..., N) of `head` from hidden states (..., H), in the head's type, which is float32."""
    # a scalar in bfloat16 has steps of 1/128 at 1: too coarse for advantages
    with torch.autocast(hidden.device.type, enabled=False):
        outputs: Tensor = head(hidden.to(head.weight.dtype))
    return outputs


def fresh_head(backbone: PreTrainedModel, *, seed: int, bias: bool) -> nn.Linear:
    """Return a head with weights drawn from N(0, INITIAL_SCALAR_STD²/H), and with a bias of 0 if ``bias``."""
    head = _empty_head(_hidden_size(backbone), 1, bias=bias)
    with torch.no_grad():
        head.weight.copy_(_draw(head, seed))
        if bias:
            head.bias.zero_()
    return head


def critic_head_from(head: nn.Linear, form: CriticHead, *, seed: int) -> nn.Linear:
    """Return a head of the form whose mean output equals that of `head` (one output, with a bias).

    Quantiles all begin as copies, since the loss drives them apart. The values of an ensemble begin apart, by the
    weights of a fresh head minus their mean.
    """
    if form.is_scalar:
        return head
    several = _empty_head(head.in_features, form.outputs, bias=True)
    with torch.no_grad():
        weight = head.weight.detach().float().expand(form.outputs, -1)
        if form.ensemble is not None:
            draws = _draw(several, seed ^ 1)  # otherwise its first row would equal a fresh head
            weight = weight + draws - draws.mean(dim=0)
        several.weight.copy_(weight)
        several.bias.copy_(head.bias.detach().float().expand(form.outputs))
    return several


def _hidden_size(backbone: PreTrainedModel) -> int:
    size: int = backbone.config.get_text_config().hidden_size
    return size


def _empty_head(hidden_size: int, outputs: int, *, bias: bool) -> nn.Linear:
    head: nn.Linear = nn.utils.skip_init(nn.Linear, hidden_size, outputs, bias=bias)
    return head


def _draw(head: nn.Linear, seed: int) -> Tensor:
    """Return weights of the head's shape, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(head.weight.shape).normal_(
        0.0, INITIAL_SCALAR_STD / head.in_features**0.5, generator=generator
    )
