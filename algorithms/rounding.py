"""Tell a spread of numbers from their rounding, which a division by it would amplify."""

import torch
from torch import Tensor

STEPS = 8
"""Roundings of a number that may add up on the way to it: sums of a few terms differ by so much if these come in another order."""


def is_rounding(spread: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where the spread of numbers is at most 8 ε · their largest size, ε that of `dtype`; a NaN is none.

    `spread` and `size` have one shape.
    """
    return spread <= STEPS * torch.finfo(dtype).eps * size
