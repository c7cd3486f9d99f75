"""Draw the plots of a report: learning curves, and distributions before and after. A plot that has been drawn is kept."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from vantage.ledger.pages.svg_plots import BAD, GOOD, INK, LOW, ONE, OTHER, TWO, Plot, svg
from vantage.review.reports.curve_words import title_and_note
from vantage.review.reports.gathered import Comparison, Curve, Distribution, StageCurves, Times
from vantage.review.reports.ridges import density, edges_of
from vantage.review.reports.words import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Draw = Callable[[Axes], None]

_MARKED = 40
"""Curves of at most so many points show them."""
_RIDGE_HEIGHT = 1.3
"""Height of a ridge's densest part, in distances between two ridges: they overlap a little."""
_MOST_TICKS = 8
_OF_PHASE: Mapping[str, Mapping[str, Any]] = {
    "sampling": {"color": ONE},
    "waiting": {"color": BAD, "hatch": "//"},
    "scoring": {"color": TWO},
    "reading": {"color": TWO, "alpha": 0.45},
    "updating": {"color": GOOD},
    "measuring": {"color": OTHER},
    "other": {"color": OTHER, "alpha": 0.35},
}
"""Group of phases → how its part of a bar is drawn."""
_CROSSING_ZERO = frozenset({"explained_variance", "validation_explained_variance", "value_bias"})


def curve_plots(stage: StageCurves) -> list[Plot]:
    """Return a plot for each curve."""
    return [_curve(stage, curve) for curve in stage.curves]


def ridge_plots(stage: StageCurves) -> list[Plot]:
    """Return the plot of the stage's ridges; none where it has none."""
    return [_ridges(stage)] if stage.ridges else []


def time_plots(stage: StageCurves) -> list[Plot]:
    """Return the plot of where the time of the stage's iterations went; none where that was not measured."""
    return [] if stage.times is None else [_times(stage, stage.times)]


def distribution_plots(comparison: Comparison) -> list[Plot]:
    """Return a plot for each distribution: both models in one."""
    return [_distribution(comparison, each) for each in comparison.distributions]


@cache
def value_plot(comparison: Comparison, place: int) -> Plot | None:
    """Return the critic's values while both responses of a sample grow; None: it read neither."""
    sample = comparison.samples[place]
    lines = [
        (colour, style, name, values)
        for colour, style, name, answer in (
            (TWO, "--", f"{comparison.baseline} (baseline)", sample.baseline),
            (ONE, "-", f"{comparison.candidate} (candidate)", sample.candidate),
        )
        if (values := [token.value for token in answer.tokens if token.value is not None])
    ]
    if not lines:
        return None

    def draw(axes: "Axes") -> None:
        for colour, style, name, values in lines:
            axes.plot(
                range(1, len(values) + 1), values, color=colour, linestyle=style, linewidth=1.5, label=name
            )
        axes.set_xlabel("token", labelpad=2)
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.locator_params(axis="y", nbins=6)
        axes.legend(frameon=False, fontsize=8, loc="best")

    ends = "; ".join(f"{name} {number(values[0])} → {number(values[-1])}" for _, _, name, values in lines)
    return Plot(
        title="Value: the reward that the critic expects before each token",
        note=ends,
        svg=svg(
            draw,
            label=f"{comparison.step}, prompt {place + 1}: value by token; {ends}",
            size=LOW,
            fitted=False,
        ),
    )


@cache
def _curve(stage: StageCurves, curve: Curve) -> Plot:
    steps, values = [step for step, _ in curve.points], [value for _, value in curve.points]

    def draw(axes: "Axes") -> None:
        if curve.metric in _CROSSING_ZERO:
            axes.axhline(0, color=INK, linewidth=0.8)
        marked = len(steps) <= _MARKED
        if curve.band:
            at, low, high = (list(column) for column in zip(*curve.band, strict=True))
            axes.fill_between(at, low, high, color=OTHER, alpha=0.3, linewidth=0)
        if curve.trend:
            axes.plot(steps, values, color=OTHER, linewidth=0.7, alpha=0.7)
            axes.plot(*zip(*curve.trend, strict=True), color=ONE, linewidth=1.8)
        else:
            axes.plot(steps, values, color=ONE, linewidth=1.2, marker="o" if marked else None, markersize=3)
        for step in curve.fired:
            axes.axvline(step, color=BAD, linewidth=1.2, linestyle="--")
        axes.set_xlabel(stage.by, labelpad=2)
        axes.locator_params(axis="x", integer=True, nbins=6)
        axes.locator_params(axis="y", nbins=6)

    unit = f", {curve.unit}" if curve.unit not in ("", "1") else ""
    ends = f"{number(values[0])} → {number(values[-1])}"
    title, note = title_and_note(curve.metric, stage.kind)
    band = "the band is from the 10th to the 90th percentile" if curve.band else ""
    said = ", ".join(filter(None, [note, band, _fired(curve), _left_out(curve)]))
    label = (
        f"{stage.step}: {title} ({curve.metric}{unit}) by {stage.by}, from {ends}, lowest {number(min(values))}, "
        f"highest {number(max(values))}{f'; {_fired(curve)}' if curve.fired else ''}"
    )
    return Plot(
        title=f"{title} ({curve.metric}{unit})",
        note=f"{ends}{f'; {said}' if said else ''}",
        svg=svg(draw, label=label, size=LOW, fitted=False),
    )


@cache
def _ridges(stage: StageCurves) -> Plot:
    ridges, edges = stage.ridges, edges_of(stage.ridges)
    colours = {"data": OTHER, "before": TWO, "iteration": ONE}

    def draw(axes: "Axes") -> None:
        for place, ridge in enumerate(ridges):
            found, floor = density(ridge, edges), -place
            heights = [floor + _RIDGE_HEIGHT * each / max(found) for each in found]
            colour, order = colours[ridge.kind], 2 * place
            axes.stairs(heights, edges, baseline=floor, fill=True, color=colour, alpha=0.35, zorder=order)
            axes.stairs(heights, edges, baseline=floor, color=colour, linewidth=1.0, zorder=order + 1)
            if ridge.median is not None:
                axes.plot(
                    [ridge.median] * 2, [floor, floor + 0.5], color=INK, linewidth=1.2, zorder=order + 1
                )
        axes.set_yticks([-place for place in range(len(ridges))], [each.name for each in ridges])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("score", labelpad=2)
        axes.set_ylabel(stage.by)
        axes.locator_params(axis="x", nbins=6)

    low, high = (100 * share for share in (ridges[-1].points[0][0], ridges[-1].points[-1][0]))
    named = [(each.name, each) for each in ridges if each.kind != "iteration"]
    named.append((f"{stage.by} {ridges[-1].name}", ridges[-1]))
    medians = ", ".join(f"{name} {number(each.median)}" for name, each in named if each.median is not None)
    note = (
        f"from the {low:g}th to the {high:g}th percentile; scores between two percentiles are drawn as evenly spread; all ridges "
        f"are equally high; line: median ({medians})"
    )
    title = "Held-out scores by iteration (validation_score, reward)"
    size = (LOW[0], max(LOW[1], 0.9 + 0.3 * len(ridges)))
    return Plot(title=title, note=note, svg=svg(draw, label=f"{stage.step}: {title}, {note}", size=size))


@cache
def _times(stage: StageCurves, times: Times) -> Plot:
    names = [name for name, _ in times.bars]

    def draw(axes: "Axes") -> None:
        floors = [0.0] * len(times.bars)
        for place, each in enumerate(times.phases):
            heights = [seconds[place] for _, seconds in times.bars]
            style = _OF_PHASE[each.phase]
            axes.bar(
                range(len(names)),
                heights,
                bottom=floors,
                width=0.85,
                label=each.phase,
                edgecolor=INK,
                linewidth=0.3,
                **style,
            )
            floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
        every = -(-len(names) // _MOST_TICKS)
        axes.set_xticks(range(0, len(names), every), names[::every])
        axes.set_xlabel(stage.by, labelpad=2)
        axes.set_ylabel("seconds")
        axes.locator_params(axis="y", nbins=6)
        axes.margins(y=0.25)
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=4, columnspacing=0.8, handlelength=1.2)

    shares = ", ".join(f"{each.phase} {100 * each.share:.0f} %" for each in times.phases)
    title = f"Seconds of an {stage.by}" if stage.by == "iteration" else f"Seconds of a {stage.by}"
    note = f"mean {number(times.seconds)} s: {shares}"
    return Plot(title=title, note=note, svg=svg(draw, label=f"{stage.step}: {title}, {note}"))


def _fired(curve: Curve) -> str:
    return f"a guard fired after step {', '.join(map(str, curve.fired))} (dashed)" if curve.fired else ""


def _left_out(curve: Curve) -> str:
    parts = []
    if len(curve.points) < curve.total:
        parts.append(f"{len(curve.points)} of {curve.total:,} points")
    if curve.undefined:
        parts.append(f"{curve.undefined:,} points that are not finite are left out")
    return ", ".join(parts)


@cache
def _distribution(comparison: Comparison, of: Distribution) -> Plot:
    sides = (
        (TWO, f"{comparison.baseline} (before)", of.baseline),
        (ONE, f"{comparison.candidate} (after)", of.candidate),
    )

    def draw(axes: "Axes") -> None:
        if of.is_discrete:
            for number_of_side, (colour, name, counts) in enumerate(sides):
                places = [place + (number_of_side - 0.5) * 0.38 for place in range(len(counts))]
                bars = axes.bar(places, _shares(counts), width=0.36, color=colour, label=name)
                axes.bar_label(bars, fmt="%.0f %%", fontsize=8, padding=1)
            axes.set_xticks(range(len(of.edges)), [f"{edge:g}" for edge in of.edges])
            axes.margins(y=0.15)
        else:
            for colour, name, counts in sides:
                dashed = "--" if colour == TWO else "-"
                axes.stairs(
                    _shares(counts), of.edges, color=colour, linewidth=1.5, label=name, linestyle=dashed
                )
        axes.set_ylabel("% of responses")
        axes.legend(frameon=False, fontsize=8, loc="best")

    means = f"mean {number(of.baseline_mean)} → {number(of.candidate_mean)}"
    label = f"{comparison.step}: {of.what}, {comparison.baseline} (baseline) against {comparison.candidate} (candidate), {means}"
    return Plot(title=of.what, note=means, svg=svg(draw, label=label))


def _shares(counts: tuple[int, ...]) -> list[float]:
    return [100 * count / sum(counts) for count in counts]
