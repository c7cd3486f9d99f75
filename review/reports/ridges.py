"""Ridges: the spread of the scores of a policy's responses at each validation, drawn from the reported percentiles."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import isfinite

from vantage.review.reports.gathered import Ridge
from vantage.runs.history import Row
from vantage.schemas.metric_names import SCORE_PERCENTILES

MOST_RIDGES = 9
"""Most validations that are drawn. Of more, this number at equal distances is drawn, including the last."""
BINS = 60
FEWEST_PERCENTILES = 3
SHOWN = ("validation_score", "initial_score", "reward_data_score")
"""Sets of scores whose percentiles are drawn."""


def is_shown(metric: str) -> bool:
    """Return whether a metric is a percentile that ridges show."""
    name, _, percent = metric.rpartition("_p")
    return name in SHOWN and percent.isdigit()


def ridges_of(measured: Mapping[str, Sequence[Row]]) -> tuple[Ridge, ...]:
    """Return the ridges of a stage: the reward's own data and the first policy, where they are known, then the validations.

    Args:
        measured: metric → its rows.
    """
    by_step = _percentiles(measured, "validation_score")
    if not by_step:
        return ()
    found, last = [], max(by_step)
    if of_data := _percentiles(measured, "reward_data_score").get(last):
        found.append(Ridge("data of the reward", of_data, "data"))
    if before := _percentiles(measured, "initial_score").get(last):
        found.append(Ridge("before", before, "before"))
    return (*found, *(Ridge(str(step), by_step[step], "iteration") for step in _some(sorted(by_step))))


def density(ridge: Ridge, edges: Sequence[float]) -> list[float]:
    """Return the share of the responses in each bin: the scores between two percentiles count as spread evenly.

    Those below the lowest percentile and above the highest are left out: how far they lie is not known.
    """
    found = [0.0] * (len(edges) - 1)
    for (low, start), (high, end) in zip(ridge.points, ridge.points[1:], strict=False):
        share = high - low
        if end <= start:  # all of these responses score the same
            found[min(max(bisect_left(edges, start) - 1, 0), len(found) - 1)] += share
            continue
        for place in range(len(found)):
            inside = min(end, edges[place + 1]) - max(start, edges[place])
            found[place] += share * max(inside, 0.0) / (end - start)
    return found


def edges_of(ridges: Sequence[Ridge]) -> list[float]:
    """Return the ends of equal bins that hold all ridges."""
    values = [value for ridge in ridges for _, value in ridge.points]
    low, high = min(values), max(values)
    pad = 0.02 * (high - low) or 0.5
    low, high = low - pad, high + pad
    return [low + (high - low) * place / BINS for place in range(BINS + 1)]


def _percentiles(
    measured: Mapping[str, Sequence[Row]], name: str
) -> dict[int, tuple[tuple[float, float], ...]]:
    """Return step → (share, value) of each percentile, of steps that reported enough of them."""
    found: dict[int, list[tuple[float, float]]] = {}
    for percent in SCORE_PERCENTILES:
        for step, _, value in measured.get(f"{name}_p{percent}", ()):
            if isfinite(value):
                found.setdefault(step, []).append((percent / 100, value))
    return {step: tuple(points) for step, points in found.items() if len(points) >= FEWEST_PERCENTILES}


def _some(steps: Sequence[int]) -> list[int]:
    if len(steps) <= MOST_RIDGES:
        return list(steps)
    places = [round(number * (len(steps) - 1) / (MOST_RIDGES - 1)) for number in range(MOST_RIDGES)]
    return [steps[place] for place in places]
