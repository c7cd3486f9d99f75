"""Ridges show what percentiles tell of a distribution, and a report draws the right ones."""

import re
from math import nan
from xml.etree import ElementTree

import numpy as np
import pytest

from vantage.review.reports import plots
from vantage.review.reports.curves import stage_curves
from vantage.review.reports.gathered import Ridge
from vantage.review.reports.ridges import BINS, MOST_RIDGES, density, edges_of, ridges_of
from vantage.runs.history import Row
from vantage.schemas.metric_names import SCORE_PERCENTILES

Measured = dict[str, list[Row]]


def measured_at(steps: list[int], name: str = "validation_score", shift: float = 0.0) -> Measured:
    """Return percentiles of the scores of step s: percentile p is p + s + shift."""
    return {
        f"{name}_p{percent}": [(step, 0, float(percent + step) + shift) for step in steps]
        for percent in SCORE_PERCENTILES
    }


def test_a_density_by_hand() -> None:
    """A fifth of the responses lies between 0 and 1, three fifths between 1 and 4: 0.2 in each bin but the last, which is empty."""
    ridge = Ridge("1", ((0.1, 0.0), (0.3, 1.0), (0.9, 4.0)), "iteration")
    assert density(ridge, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.0])
    assert density(ridge, [-1.0, 0.5, 2.5, 6.0]) == pytest.approx([0.1, 0.1 + 0.3, 0.3])


def test_equal_scores_are_in_one_bin() -> None:
    """A verifier's rewards are 0 for the lower half and 1 for the rest."""
    ridge = Ridge("1", ((0.05, 0.0), (0.5, 0.0), (0.75, 1.0), (0.95, 1.0)), "iteration")
    edges = [-0.25, 0.25, 0.75, 1.25]
    assert density(ridge, edges) == pytest.approx([0.45 + 0.25 * 0.25, 0.25 * 0.5, 0.2 + 0.25 * 0.25])


def test_what_is_drawn_of_many_scores_is_their_histogram() -> None:
    """The shares of bins that hold whole pieces between percentiles, counted in the scores themselves."""
    scores = np.random.default_rng(7).normal(size=100_000)
    values = np.percentile(scores, SCORE_PERCENTILES)
    points = tuple(
        (percent / 100, float(value)) for percent, value in zip(SCORE_PERCENTILES, values, strict=True)
    )
    ridge = Ridge("1", points, "iteration")
    counted, _ = np.histogram(scores, bins=values)
    assert density(ridge, [float(value) for value in values]) == pytest.approx(
        counted / len(scores), abs=1e-4
    )
    assert sum(density(ridge, edges_of([ridge]))) == pytest.approx(0.9)


def test_bins_hold_all_ridges() -> None:
    ridges = [
        Ridge("1", ((0.1, 2.0), (0.9, 2.0)), "iteration"),
        Ridge("2", ((0.1, 2.0), (0.9, 2.0)), "iteration"),
    ]
    edges = edges_of(ridges)
    assert len(edges) == BINS + 1
    assert edges[0] < 2.0 < edges[-1], "scores that are all the same have a width too"
    assert sum(density(ridges[0], edges)) == pytest.approx(0.8)


def test_the_rewards_own_data_and_the_first_policy_come_first() -> None:
    of_data, before = (
        measured_at([2, 4], "reward_data_score", 100.0),
        measured_at([2, 4], "initial_score", 50.0),
    )
    found = ridges_of(measured_at([2, 4]) | of_data | before)
    assert [(each.name, each.kind) for each in found] == [
        ("data of the reward", "data"),
        ("before", "before"),
        ("2", "iteration"),
        ("4", "iteration"),
    ]
    assert [each.median for each in found] == [154.0, 104.0, 52.0, 54.0]
    assert found[2].points == tuple((percent / 100, percent + 2.0) for percent in SCORE_PERCENTILES)
    assert [each.name for each in ridges_of(measured_at([2, 4]))] == ["2", "4"]


def test_of_many_validations_some_are_drawn_with_the_last() -> None:
    names = [int(each.name) for each in ridges_of(measured_at(list(range(5, 505, 5))))]
    assert (len(names), names[0], names[-1]) == (MOST_RIDGES, 5, 500)
    assert max(np.diff(names)) - min(np.diff(names)) <= 5


def test_percentiles_of_an_earlier_version_are_drawn_and_fewer_are_not() -> None:
    whole = measured_at([3])
    old = {f"validation_score_p{percent}": whole[f"validation_score_p{percent}"] for percent in (10, 50, 90)}
    [ridge] = ridges_of(old)
    assert ridge.points == ((0.1, 13.0), (0.5, 53.0), (0.9, 93.0))
    assert ridges_of(old | {"validation_score_p90": [(3, 0, nan)]}) == ()
    assert ridges_of({"loss": [(1, 0, 1.0)]}) == ()


def test_a_stage_with_ridges_has_a_plot_that_explains_itself() -> None:
    measured = {"score_mean": [(1, 0, 0.1)], **measured_at([2, 4]), **measured_at([2, 4], "initial_score")}
    stage = stage_curves("policy", "policy_optimization", measured, most=9)
    assert stage is not None
    assert stage.others == (), "what ridges show is drawn"
    [plot] = plots.ridge_plots(stage)
    assert plot.note == (
        "from the 5th to the 95th percentile; scores between two percentiles are drawn as evenly spread; all ridges are equally high; "
        "line: median (before 54, iteration 4 54)"
    )
    element = ElementTree.fromstring(plot.svg)
    assert {"before", "2", "4", "iteration", "score"} <= set(element.itertext())
    assert set(re.findall(r"#[0-9a-f]{6}", plot.svg)) == set(), "all colours are the page's, light or dark"
    assert "var(--one)" in plot.svg and "var(--two)" in plot.svg

    plain = stage_curves("sft", "sft", {"loss": [(1, 0, 1.0)]}, most=9)
    assert plain is not None
    assert plots.ridge_plots(plain) == []
