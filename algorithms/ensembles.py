"""Combine the scores of several reward models, and measure their disagreement: conservative ensembles against
over-optimisation.

If models were trained with different seeds or data, they differ most on responses unlike those of their training, where
a policy finds mistakes to exploit (Coste et al., arXiv 2310.02743; mean − k·std as in arXiv 2606.09073).
"""

from typing import Literal

from torch import Tensor

Combination = Literal["mean", "min", "mean_minus_std"]


def combined(scores: Tensor, combine: Combination, *, k: float = 1.0) -> Tensor:
    """Combine `scores` (M,B) of M models to one (B,): their mean, their minimum, or mean − k · standard deviation.

    Raises ValueError for another shape, or no model.
    """
    _check(scores)
    if combine == "mean":
        return scores.mean(dim=0)
    if combine == "min":
        return scores.min(dim=0).values
    return scores.mean(dim=0) - k * disagreement(scores)


def disagreement(scores: Tensor) -> Tensor:
    """Return the population standard deviation (B,) of `scores` (M,B) over the models; 0 for a single model.

    Raises ValueError for another shape, or no model.
    """
    _check(scores)
    return scores.std(dim=0, correction=0)


def _check(scores: Tensor) -> None:
    if scores.dim() != 2 or not scores.shape[0]:
        raise ValueError(f"scores have shape {tuple(scores.shape)}; they are (M,B) of one model or more")
