"""Test rank bounds on the recorded curves: chosen on seed 1, reported on the other seeds.

    python -m docs.guard_trials.bounds judge       # rules for the fall of the judge's score
    python -m docs.guard_trials.bounds no_judge    # rules on curves that need no judge
    python -m docs.guard_trials.bounds agreement   # pair accuracy of the reward in the first iteration

A row shows: healthy runs with an alarm, collapses that were seen, and how many of them within five iterations of the onset.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

from docs.guard_trials.trials import COLLAPSES, HEALTHY, JUDGED, UNLIKELY, recorded_rows

Run = tuple[str, int]
Rule = Callable[[Run], int | None]
"""A run → the iteration in which a warning comes first, or None."""
LAST, SOON = 20, 5
curves: dict[Run, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
firings: dict[Run, dict[str, int]] = defaultdict(dict)
for row in recorded_rows():
    key = row["trial"], int(row["seed"])
    if row["row"] == "firing":
        firings[key].setdefault(row["name"].partition(" ")[0].removesuffix(":"), int(row["iteration"]))
    elif int(row["iteration"]) <= LAST:
        curves[key][row["name"]].append(float(row["value"]))
healthy = [run for run in curves if run[0] in HEALTHY]
collapsed = [run for run in curves if run[0] in COLLAPSES and run[0] != "blind_critic"]


def onset(run: Run) -> int:
    """Return the first iteration from which the judge's score stays more than 0.05 below its best."""
    scores = curves[run][JUDGED]
    high = [step for step, score in enumerate(scores, 1) if score >= max(_start(run), *scores) - 0.05]
    return max(high, default=0) + 1


def _start(run: Run) -> float:
    """Return the judge's score before the first iteration."""
    return curves[run][JUDGED][0] - curves[run]["watch_change"][0]


def rises(name: str, *, by: float, over: int) -> Rule:
    """Return the rule of ``rises_by``."""
    return lambda run: next(
        (
            end
            for end in range(2 * over, LAST + 1)
            if fmean(curves[run][name][end - over : end])
            - fmean(curves[run][name][end - 2 * over : end - over])
            > by
        ),
        None,
    )


def rises_since_the_first(name: str, *, by: float, over: int) -> Rule:
    """Return the rule of a mean that exceeds that of the first reports."""
    return lambda run: next(
        (
            end
            for end in range(over + 1, LAST + 1)
            if fmean(curves[run][name][end - over : end]) - fmean(curves[run][name][:over]) > by
        ),
        None,
    )


def in_a_row(is_beyond: Callable[[Run, int], bool], *, over: int) -> Rule:
    """Return the rule of so many reports in a row that are beyond a bound."""
    return lambda run: next(
        (
            end
            for end in range(over, len(curves[run][JUDGED]) + 1)
            if all(is_beyond(run, end - 1 - back) for back in range(over))
        ),
        None,
    )


def lost(run: Run, place: int) -> float:
    """Return the share of the judge's best score that is lost, 0 within its 99.9 % interval where that was recorded."""
    change, score = curves[run]["watch_change"][place], curves[run][JUDGED][place]
    worse = curves[run].get("watch_worse")
    return 0.0 if change >= 0 or (worse and not worse[place]) else -change / (score - change)


def recorded(run: Run) -> int | None:
    """Return the first firing of a default without a judge, that of reference_nll left out."""
    return min((step for name, step in firings[run].items() if not name.startswith("watch")), default=None)


def either(*rules: Rule) -> Rule:
    """Return the rule that warns with the first of several."""
    return lambda run: min((step for rule in rules if (step := rule(run)) is not None), default=None)


def show(name: str, rule: Rule) -> None:
    """Print a row for a rule."""
    cells = []
    for is_in in (_chose, _reports):
        alarms = [run for run in healthy if is_in(run[1]) and rule(run) is not None]
        ill = [run for run in collapsed if is_in(run[1])]
        delays = [step - onset(run) for run in ill if (step := rule(run)) is not None]
        soon = sum(delay <= SOON for delay in delays)
        names = ", ".join(f"{preset} {seed}" for preset, seed in alarms)
        cells.append(
            f"{len(alarms)} of {sum(is_in(run[1]) for run in healthy)}{f' ({names})' if names else ''}"
        )
        cells.append(f"{len(delays)}, {soon} of {len(ill)}")
    print(f"| {name} | " + " | ".join(cells) + " |")


def _chose(seed: int) -> bool:
    """Return whether bounds are chosen on runs with this seed."""
    return seed == 1


def _reports(seed: int) -> bool:
    """Return whether results are reported on runs with this seed."""
    return not _chose(seed)


def head() -> None:
    """Print the head of a table of rules."""
    print("| rule | healthy, seed 1 | seen, soon: seed 1 | healthy, others | seen, soon: others |")
    print("|---|---|---|---|---|")


def judge() -> None:
    """Print rules on the fall of the judge's score."""
    head()
    for over in (1, 2, 3):
        show(f"beyond the interval, {over} in a row", in_a_row(lambda *at: lost(*at) > 0, over=over))
    for bound in (0.05, 0.075, 0.1, 0.15):
        for over in (1, 2):
            show(
                f"and more than {bound:g} of the best, {over} in a row",
                in_a_row(lambda *at, bound=bound: lost(*at) > bound, over=over),
            )


def no_judge() -> None:
    """Print rules on curves without a judge; each bound is twice the highest of the healthy runs with seed 1."""
    head()
    show("recorded defaults", recorded)
    for over in (1, 2, 3):
        for by in (0.05, 0.075, 0.1):
            show(f"{UNLIKELY} rises by {by:g}, over {over}", rises(UNLIKELY, by=by, over=over))
    for by in (0.1, 0.05):
        show(
            f"{UNLIKELY} rises by {by:g}, over 3, or recorded",
            either(rises(UNLIKELY, by=by, over=3), recorded),
        )
    for name in (UNLIKELY, "kl_to_reference", "validation_score_drift", "approx_kl"):
        for kind in (rises, rises_since_the_first):
            for over in (2, 3):
                by = twice_the_highest(name, kind, over)
                show(
                    f"{name} {kind.__name__.replace('_', ' ')} by {by:.3g}, over {over}",
                    kind(name, by=by, over=over),
                )


def twice_the_highest(name: str, kind: Callable[..., Rule], over: int) -> float:
    """Return twice the smallest bound that no healthy run with seed 1 exceeds."""
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        quiet = all(kind(name, by=middle, over=over)(run) is None for run in healthy if run[1] == 1)
        low, high = (low, middle) if quiet else (middle, high)
    return 2 * high


def agreement() -> None:
    """Print the range of the reward's pair accuracy in the first iteration, for each kind of run."""
    for name in dict.fromkeys(run[0] for run in [*healthy, *collapsed]):
        found = [
            curves[run]["watch_pair_accuracy"][0]
            for run in curves
            if run[0] == name and curves[run]["watch_pair_accuracy"]
        ]
        print(name, *(f"{value:.2f}" for value in found))


def main(names: Sequence[str]) -> None:
    """Print the tables that are named."""
    for name in names:
        {"judge": judge, "no_judge": no_judge, "agreement": agreement}[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
