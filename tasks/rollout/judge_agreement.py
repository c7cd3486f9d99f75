"""Measure whether the reward and a watch's judge agree before anything is trained. If they do not, one may be wrong."""

from collections.abc import Mapping
from math import isfinite
from types import MappingProxyType

import torch
from torch import Tensor

from vantage.algorithms.divergence_of_judges import Z
from vantage.algorithms.pair_agreement import pair_agreement
from vantage.algorithms.uncertainty import Estimate
from vantage.schemas.metric_names import INITIAL_AGREEMENT, JUDGE_OF_PREFERENCES, REWARD_OF_PREFERENCES
from vantage.tasks.training import ranks

_WHO = {REWARD_OF_PREFERENCES: "the reward", JUDGE_OF_PREFERENCES: "the judge"}
CHANCE = 0.5
"""Pair accuracy of a reward that knows nothing about the judge's scores."""


def agreement_with_interval(rewards: Tensor, judged: Tensor, clusters: Tensor) -> tuple[float, ...]:
    """Return the rewards' pair accuracy according to the judge, with both ends of its 95 % interval; empty if
    undefined.

    All (N,); ``clusters`` are the rows' prompts.
    """
    found = pair_agreement(rewards, judged, clusters)
    if not isfinite(found.standard_error):
        return ()
    ends = (found.value + sign * Z * found.standard_error for sign in (0, -1, 1))
    return tuple(ranks.agreed(min(max(end, 0.0), 1.0)) for end in ends)


def pair_accuracy(rewards: Tensor, judged: Tensor) -> dict[str, float]:
    """Return the curve of the present responses' pair accuracy; empty if it is undefined."""
    value = pair_agreement(rewards, judged, torch.arange(len(rewards))).value
    return {"watch_pair_accuracy": value} if isfinite(value) else {}


def initial_metrics(agreement: tuple[float, ...]) -> dict[str, float]:
    """Return the curves of the agreement before training: the same numbers at each measurement."""
    return dict(zip(INITIAL_AGREEMENT, agreement, strict=True)) if agreement else {}


def disagreement_notice(
    agreement: tuple[float, ...], preferred: Mapping[str, Estimate] = MappingProxyType({})
) -> str | None:
    """Return what to show before the first step if reward and judge are not shown to agree; None: they agree, or it is unknown.

    ``preferred``: metric → share of held-out pairs in which the reward or the judge prefers the chosen response.
    """
    if not agreement or agreement[1] >= CHANCE:
        return None
    value, low, high = agreement
    return (
        f"before training, the reward prefers the response that the watch's judge prefers in {value:.0%} of the pairs "
        f"(95 % interval {low:.0%} to {high:.0%}; chance is 50 %). The two are not shown to agree: the reward or the judge may be wrong, "
        "and this number cannot show which. If the judge is wrong, the watch hands on a worse policy. Read some responses with both "
        "scores before you trust either"
        + "".join(_of_pairs(_WHO[name], each) for name, each in preferred.items())
    )


def _of_pairs(who: str, share: Estimate) -> str:
    """Return a sentence about the share of held-out pairs in which one of the two prefers the chosen response."""
    margin = Z * share.standard_error
    return f". In held-out preferences, {who} prefers the chosen response in {share.value:.0%} of {share.num_rows} pairs (± {margin:.0%})"
