"""Penalties of long responses, as scores of their lengths."""

import torch
from torch import Tensor

from vantage.algorithms.groups import index_of_groups


def linear_penalty(lengths: Tensor, *, limit: int) -> Tensor:
    """Return −length/limit: −1 at the limit.

    `lengths` (B,) and `limit` in response tokens → (B,) in float64.

    Raises ValueError for a limit that is not positive.
    """
    if limit <= 0:
        raise ValueError(f"limit={limit} must be positive")
    return -lengths.detach().double() / limit


def relative_penalty(lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Return 1/2 − (length − shortest)/(longest − shortest) within each group, 0 if all are equal.

    Kimi k1.5, arXiv 2501.12599 §2.3.3, without its bound of 0 for wrong responses. `lengths` (B,) in response tokens,
    `group_ids` (B,) → (B,) in float64.

    Raises: see `index_of_groups`.
    """
    index, sizes = index_of_groups(group_ids, len(lengths))
    exact = lengths.detach().double()
    ends = [
        exact.new_zeros(len(sizes)).scatter_reduce(0, index, exact, reduce, include_self=False)[index]
        for reduce in ("amin", "amax")
    ]
    shortest, longest = ends
    share = (exact - shortest) / (longest - shortest).clamp(min=1)
    return torch.where(longest == shortest, torch.zeros_like(exact), 0.5 - share)
