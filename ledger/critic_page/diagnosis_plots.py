"""Plots of a critic's diagnosis."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vantage.ledger.pages.svg_plots import BAD, INK, ONE, OTHER, Plot, svg
from vantage.schemas.records.critic_diagnosis import CriticDiagnosis, CriticDrift, DiagnosedSlice, Estimated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Draw = Callable[[Axes], None]


def diagnosis_plots(diagnosis: CriticDiagnosis) -> list[Plot]:
    """Return the plots of a pretrained critic."""
    plots = [
        _plot(
            "Explained variance along the response (good: above 0, and rising)",
            _slices(diagnosis.by_tenth, "tenth of the response"),
        ),
        _plot(
            "Explained variance by tokens left (good: above 0)",
            _slices(diagnosis.by_tokens_left, "tokens left"),
        ),
        _plot(
            "Explained variance by length of the response (good: above 0)",
            _slices(diagnosis.by_length, "tokens"),
        ),
        _plot("Calibration (good: points on the line)", _calibration(diagnosis)),
        _plot(
            "Mean squared advantage by baseline (good: the critic's is the smallest)", _baselines(diagnosis)
        ),
    ]
    if diagnosis.by_difficulty:
        plots.append(
            _plot(
                "Explained variance by difficulty (good: above 0)",
                _slices(diagnosis.by_difficulty, "responses"),
            )
        )
    if diagnosis.orderings:
        plots.append(
            _plot("Order of responses to one prompt (good: above 0, and rising)", _orderings(diagnosis))
        )
    return plots


def drift_plots(drift: CriticDrift) -> list[Plot]:
    """Return the plots of a critic during policy optimisation."""
    plots = [_plot("Explained variance (good: stays above 0)", _course(drift, "explained_variance"))]
    if drift.is_switched:
        plots.append(
            _plot("Critic's weight (1: its advantages, 0: the batch mean's)", _course(drift, "critic_weight"))
        )
    return [
        *plots,
        _plot("Bias, value − return (good: near 0)", _course(drift, "value_bias")),
        _plot("Value loss", _course(drift, "value_loss")),
    ]


def _plot(title: str, draw: "Draw") -> Plot:
    return Plot(title, svg(draw, label=title))


def _slices(slices: Sequence[DiagnosedSlice], label: str) -> "Draw":
    def draw(axes: "Axes") -> None:
        axes.axhline(0, color=INK, linewidth=0.8)
        for place, each in enumerate(slices):
            _point(axes, place, each.explained_variance)
        axes.set_xticks(range(len(slices)), [each.label for each in slices])
        if max((len(each.label) for each in slices), default=0) > 3 and len(slices) > 4:
            axes.tick_params(axis="x", labelrotation=40)
        axes.set_xlim(-0.5, max(len(slices), 1) - 0.5)
        _keep_in_view(axes, [each.explained_variance for each in slices])
        axes.set_xlabel(label)

    return draw


def _keep_in_view(axes: "Axes", estimates: Sequence[Estimated]) -> None:
    """Show the range from 0 to 1 and every value; an interval may leave the plot, so that a wide one does not flatten the
    rest."""
    values = [each.value for each in estimates if each.value is not None]
    low, high = min([0.0, *values]), max([1.0, *values])
    margin = 0.08 * (high - low)
    axes.set_ylim(low - margin, high + margin)


def _calibration(diagnosis: CriticDiagnosis) -> "Draw":
    def draw(axes: "Axes") -> None:
        values = [each.value for each in diagnosis.calibration]
        found = [each.returned.value for each in diagnosis.calibration if each.returned.value is not None]
        ends = [min([*values, *found]), max([*values, *found])]
        axes.plot(ends, ends, color=INK, linewidth=0.8)
        for each in diagnosis.calibration:
            _point(axes, each.value, each.returned, colour=ONE)
        axes.set_xlabel("mean value")
        axes.set_ylabel("mean return")

    return draw


def _baselines(diagnosis: CriticDiagnosis) -> "Draw":
    squares = diagnosis.advantages
    rows = [
        ("critic", squares.critic),
        ("batch mean", squares.batch_mean),
        ("others' mean", squares.others_mean),
    ]
    shown = [(name, each) for name, each in rows if each is not None]

    def draw(axes: "Axes") -> None:
        for place, (name, each) in enumerate(shown):
            error = _reach(each)
            colour = ONE if name == "critic" else OTHER
            axes.barh(place, each.value or 0.0, height=0.6, color=colour)
            if error:
                axes.errorbar(each.value or 0.0, place, xerr=error, fmt="none", color=INK, capsize=3)
        axes.set_yticks(range(len(shown)), [name for name, _ in shown])
        axes.invert_yaxis()
        axes.set_xlabel("mean squared advantage")

    return draw


def _orderings(diagnosis: CriticDiagnosis) -> "Draw":
    def draw(axes: "Axes") -> None:
        axes.axhline(0, color=INK, linewidth=0.8)
        for each in diagnosis.orderings:
            _point(axes, 100 * each.at, each.correlation)
        axes.set_xticks([100 * each.at for each in diagnosis.orderings])
        axes.set_ylim(-0.4, 1.05)
        axes.set_xlabel("% of the response")

    return draw


def _course(drift: CriticDrift, name: str) -> "Draw":
    points = [(point.iteration, getattr(point, name)) for point in drift.points]
    found = [(iteration, value) for iteration, value in points if value is not None]

    def draw(axes: "Axes") -> None:
        if name != "value_loss":
            axes.axhline(0, color=INK, linewidth=0.8)
        axes.plot(*zip(*found, strict=True) if found else ([], []), color=ONE, marker="o", markersize=3)
        if name == "explained_variance":
            below = [(iteration, value) for iteration, value in found if value <= 0]
            axes.plot(*zip(*below, strict=True) if below else ([], []), "o", color=BAD, markersize=5)
        axes.set_xlabel("iteration")

    return draw


def _point(axes: "Axes", place: float, estimate: Estimated, *, colour: str | None = None) -> None:
    """Draw a value with its interval; red where it is not above 0."""
    if estimate.value is not None:
        colour = colour or (ONE if estimate.value > 0 else BAD)
        axes.errorbar(
            place, estimate.value, yerr=_reach(estimate), fmt="o", color=colour, capsize=3, markersize=5
        )


def _reach(estimate: Estimated) -> float | None:
    """Return half of the interval's width."""
    interval = estimate.interval
    return (interval[1] - interval[0]) / 2 if interval else None
