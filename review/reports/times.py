"""Sum up the time of a stage's iterations by phase: shares, and bars of equal parts of the iterations."""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, quantiles

from vantage.review.reports.gathered import PhaseTime, Times
from vantage.runs.history import Row
from vantage.schemas.metric_names import PHASES, TIMES

MOST_BARS = 24
"""Most bars that are drawn. With more iterations, each bar is the mean of an equal part of them."""


def is_time(metric: str) -> bool:
    """Return whether a metric is one of those that the section shows."""
    return metric in TIMES


def times_of(measured: Mapping[str, Sequence[Row]]) -> Times | None:
    """Return where the time of a stage went, or None if it was not measured.

    Args:
        measured: metric → its rows.
    """
    by_step = _by_step(measured)
    if not by_step:
        return None
    steps = sorted(by_step)
    totals = {step: sum(by_step[step].values()) for step in steps}
    phases = []
    for phase in PHASES:
        shares = [by_step[step][phase] / totals[step] for step in steps if totals[step] > 0]
        if not any(shares):
            continue
        low, high = _middle(shares)
        phases.append(
            PhaseTime(phase, fmean(by_step[step][phase] for step in steps), fmean(shares), low, high)
        )
    beside = [value for _, _, value in measured.get("seconds_beside", ()) if isfinite(value)]
    return Times(
        phases=tuple(phases),
        iterations=len(steps),
        seconds=fmean(totals.values()),
        beside=fmean(beside) if beside else None,
        bars=tuple(_bars(steps, by_step, [each.phase for each in phases])),
    )


def _by_step(measured: Mapping[str, Sequence[Row]]) -> dict[int, dict[str, float]]:
    """Return iteration → seconds of each phase, of iterations that measured all of them."""
    found: dict[int, dict[str, float]] = {}
    for phase in PHASES:
        for step, _, value in measured.get(f"seconds_{phase}", ()):
            if isfinite(value):
                found.setdefault(step, {})[phase] = value
    return {step: seconds for step, seconds in found.items() if len(seconds) == len(PHASES)}


def _bars(
    steps: Sequence[int], by_step: Mapping[int, Mapping[str, float]], phases: Sequence[str]
) -> list[tuple[str, tuple[float, ...]]]:
    """Return name and mean seconds of each phase, for each equal part of the iterations."""
    count = min(len(steps), MOST_BARS)
    found = []
    for part in range(count):
        of_part = steps[part * len(steps) // count : (part + 1) * len(steps) // count]
        name = str(of_part[0]) if len(of_part) == 1 else f"{of_part[0]}–{of_part[-1]}"
        found.append((name, tuple(fmean(by_step[step][phase] for step in of_part) for phase in phases)))
    return found


def _middle(shares: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile; of a single value, that value."""
    if len(shares) < 2:
        return shares[0], shares[0]
    cuts = quantiles(shares, n=10, method="inclusive")
    return cuts[0], cuts[-1]
