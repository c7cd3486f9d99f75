"""The head that reads one scalar per position from hidden states."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

INITIAL_SCALAR_STD = 0.1
"""Spread of a new head's outputs: small beside a reward of 1. Hidden states leave the last norm with entries of
about 1, so its weights have this over √H."""


def read_scalars(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Return scalars (...) that `head` reads from hidden states (..., H), in the head's type, which is float32."""
    # a scalar in bfloat16 has steps of 1/128 at 1: too coarse for advantages
    with torch.autocast(hidden.device.type, enabled=False):
        scalars: Tensor = head(hidden.to(head.weight.dtype))
    return scalars[..., 0]


def fresh_head(backbone: PreTrainedModel, *, seed: int, bias: bool) -> nn.Linear:
    """Return a head whose weights are drawn from N(0, INITIAL_SCALAR_STD²/H), with a bias of 0 where it has one."""
    hidden_size = backbone.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(seed)
    head: nn.Linear = nn.utils.skip_init(nn.Linear, hidden_size, 1, bias=bias)
    with torch.no_grad():
        head.weight.normal_(0.0, INITIAL_SCALAR_STD / hidden_size**0.5, generator=generator)
        if bias:
            head.bias.zero_()
    return head
