"""Describe the distribution of a set of scores, and its distance from another set: float64 on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor


def quantiles(scores: Tensor, shares: Sequence[float]) -> list[float]:
    """Return quantiles of `scores` (N,), interpolated linearly between order statistics.

    Raises ValueError for no score.
    """
    wanted = torch.tensor(list(shares), dtype=torch.float64)
    return torch.quantile(_sorted(scores, "scores"), wanted).tolist()


def are_above(scores: Tensor, bound: float) -> Tensor:
    """Return which scores (N,) are above a bound, which is rounded to the type of the scores.

    Otherwise a score of the same decimal number as the bound (0.1) could be above the bound, since its rounding is.
    """
    return scores > torch.tensor(bound, dtype=scores.dtype, device=scores.device)


def drift(scores: Tensor, before: Tensor) -> float:
    """Return the Wasserstein-1 distance of two sets of scores (N,), in standard deviations of the earlier one.

    It is the mean distance of the sorted scores: the least movement that turns one set into the other. NaN if the
    earlier
    scores are all equal.

    Raises ValueError for no score, or unequal numbers of them.
    """
    now, then = _sorted(scores, "scores"), _sorted(before, "before")
    if len(now) != len(then):
        raise ValueError(
            f"there are {len(now)} scores now and {len(then)} before; they are of the same prompts"
        )
    return _in_deviations((now - then).abs().mean(), then)


def distance_to(scores: Tensor, others: Tensor) -> float:
    """Return the Wasserstein-1 distance of scores (N,) and those of other responses (M,), in standard deviations of the others.

    It is ∫ |F(x) − G(x)| dx of the two empirical distribution functions: the distance of ``drift`` for sets of any
    size. NaN if the others
    are all equal.

    Raises ValueError for no score.
    """
    ours, theirs = _sorted(scores, "scores"), _sorted(others, "others")
    places = torch.cat([ours, theirs]).sort().values
    below = [
        torch.searchsorted(each, places[:-1], right=True).double() / len(each) for each in (ours, theirs)
    ]
    return _in_deviations(((below[0] - below[1]).abs() * places.diff()).sum(), theirs)


def _in_deviations(distance: Tensor, scores: Tensor) -> float:
    spread = scores.std(correction=0).item()
    return distance.item() / spread if spread else float("nan")


def _sorted(scores: Tensor, name: str) -> Tensor:
    if not scores.numel():
        raise ValueError(f"{name} is empty; a distribution has one score or more")
    return scores.detach().cpu().double().flatten().sort().values
