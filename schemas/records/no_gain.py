"""The value of a metric without any gain: two equal models, a coin instead of a judge, a constant critic."""

from vantage.schemas.records.uncertainty import COMPARISONS

_HALF = ("win_rate", "pair_accuracy")
_ZERO = ("explained_variance", "rank_correlation")


def no_gain(metric: str) -> float | None:
    """Return this value; None: the metric has none, so no bound on it is known to accept a loss."""
    if metric == "perplexity_ratio":
        return 1.0
    if any(part in metric for part in _HALF):
        return 0.5
    if metric in COMPARISONS or any(part in metric for part in _ZERO):
        return 0.0
    return None


def accepts_a_loss(metric: str, relation: str, bound: float) -> bool:
    """Return whether a gate ``metric relation bound`` passes values worse than no gain (``relation``: ``>=`` or ``<=``)."""
    neutral = no_gain(metric)
    if neutral is None:
        return False
    return bound < neutral if relation == ">=" else bound > neutral
