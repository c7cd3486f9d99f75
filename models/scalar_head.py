"""Reading one scalar per position from hidden states."""

import torch
from torch import Tensor, nn


def read_scalars(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Scalars (...) that `head` reads from hidden states (..., H), in the head's type, which is float32."""
    # a scalar in bfloat16 has steps of 1/128 at 1: too coarse for advantages
    with torch.autocast(hidden.device.type, enabled=False):
        scalars: Tensor = head(hidden.to(head.weight.dtype))
    return scalars[..., 0]
