"""Distinguish a spread of numbers from their rounding, which a division by the spread would amplify."""

import torch
from torch import Tensor

STEPS = 8
"""Number of roundings that may add up in a number: sums of a few terms differ by this much if their order changes."""


def is_rounding(spread: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where the spread of numbers is at most 8 ε · their largest size, ε that of `dtype`; NaN gives False.

    `spread` and `size` have one shape.
    """
    return spread <= STEPS * torch.finfo(dtype).eps * size
