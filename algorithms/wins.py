"""Wins of pairs of responses by the difference of two judgements."""

from torch import Tensor


def wins_of(differences: Tensor) -> Tensor:
    """Return (N,), float64: 1 where a difference (N,) of two judgements is above 0, 0 where it is below, ½ where it is 0."""
    return (differences > 0).double() + 0.5 * (differences == 0)
