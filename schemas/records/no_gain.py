"""The value of a metric without any gain: two equal models, a coin instead of a judge, a constant critic, the baseline."""

from collections.abc import Mapping
from math import log

from vantage.schemas.records.uncertainty import COMPARISONS

_HALF = ("win_rate", "pair_accuracy", "subgroup_accuracy")
_ZERO = ("explained_variance", "rank_correlation")
_CONSTANT = {
    "perplexity_ratio": 1.0,
    "squared_advantage_ratio": 1.0,
    "preference_loss": log(2.0),
    "brier_score": 0.25,
    "score_gap": 0.0,
    "reward_gap": 0.0,
}
_REFERENCE = {"value_mse": "constant_mse"}
"""Metric → the metric of the same stage that it should be better than."""


def no_gain(metric: str, measured: Mapping[str, float | None]) -> float | None:
    """Return the value of a metric that shows no gain; None: the metric has none, so no bound on it is known to accept
    a loss.

    Args:
        measured: the metrics of the same artifact; of an evaluation also those of its baseline.
    """
    if metric in _CONSTANT:
        return _CONSTANT[metric]
    if any(part in metric for part in _HALF):
        return 0.5
    if metric in COMPARISONS or any(part in metric for part in _ZERO):
        return 0.0
    return measured.get(_REFERENCE.get(metric, f"baseline_{metric}"))


def accepts_a_loss(metric: str, relation: str, bound: float, measured: Mapping[str, float | None]) -> bool:
    """Return whether a gate ``metric relation bound`` passes values worse than no gain (``relation``: ``>=`` or ``<=``)."""
    neutral = no_gain(metric, measured)
    if neutral is None:
        return False
    return bound < neutral if relation == ">=" else bound > neutral
