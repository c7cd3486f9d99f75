"""Decide whether a curve has left the bounds of a guard: pure functions of the curve's newest values."""

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

Relation = Literal["above", "below", "rises_by", "falls_by"]


def is_outside(
    values: Sequence[float], relation: Relation, amount: float, *, over: int, is_relative: bool = False
) -> bool:
    """Return whether the newest of `values` (oldest first) are outside the bound.

    `above`, `below`: each of the newest `over` values is beyond `amount`. `rises_by`, `falls_by`: the mean of the newest
    `over` values is more than `amount` above (below) the mean of the `over` values before them; if `is_relative`, more
    than `amount` times the size of that earlier mean. False if there are fewer values, or if one of them is NaN.

    Raises ValueError for an `over` below 1.
    """
    if over < 1:
        raise ValueError(f"over={over}; a guard looks at one value or more")
    newest = values[-over:]
    if len(newest) < over:
        return False
    if relation == "above":
        return all(value > amount for value in newest)
    if relation == "below":
        return all(value < amount for value in newest)
    earlier = values[-2 * over : -over]
    if len(earlier) < over:
        return False
    before = fmean(earlier)
    change = fmean(newest) - before if relation == "rises_by" else before - fmean(newest)
    return change > amount * (abs(before) if is_relative else 1.0)
