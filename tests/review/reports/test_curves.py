"""Curves keep the ends and spikes of long ones, mark what a guard found, and are drawn where a reader needs them."""

from math import inf, nan

import pytest

from vantage.review.reports import plots
from vantage.review.reports.curve_words import title_and_note
from vantage.review.reports.curves import (
    MOST_FIGURES,
    ORDER,
    most_of_each,
    stage_curves,
    thinned,
    tokens_of,
    trend,
)
from vantage.review.reports.gathered import Curve, StageCurves
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.records.firings import Firing
from vantage.schemas.records.metrics import METRICS


def test_a_short_curve_is_whole() -> None:
    points = [(step, float(step)) for step in range(10)]
    assert thinned(points, 10) == tuple(points)


def test_of_a_long_one_the_ends_and_every_spike_are_left() -> None:
    points = [(step, 0.0) for step in range(1000)]
    points[500] = (500, 9.0)
    points[777] = (777, -9.0)
    kept = thinned(points, 20)
    assert kept[0] == (0, 0.0) and kept[-1] == (999, 0.0)
    assert (500, 9.0) in kept and (777, -9.0) in kept
    assert len(kept) <= 20 and list(kept) == sorted(kept)


def test_by_hand() -> None:
    """The first and last points, 0 and 9, are kept. Of points 1 to 4 the highest is 5 at 3 and the lowest 1 at 4; of
    points 5 to 8 the highest is 8 at 5 and the lowest 2 at 7."""
    values = [0.0, 2.0, 3.0, 5.0, 1.0, 8.0, 3.0, 2.0, 4.0, 7.0]
    kept = thinned(list(enumerate(values)), 6)
    assert kept == ((0, 0.0), (3, 5.0), (4, 1.0), (5, 8.0), (7, 2.0), (9, 7.0))


def test_what_is_not_finite_is_counted_and_not_drawn() -> None:
    told = {"loss": [(1, 0, 1.0), (2, 0, nan), (3, 0, inf), (4, 0, 0.5)], "entropy": [(1, 0, nan)]}
    found = stage_curves("sft", "sft", told, most=9)
    assert found is not None
    [loss] = found.curves
    assert (loss.points, loss.total, loss.undefined) == (((1, 1.0), (4, 0.5)), 2, 2)
    assert found.others == ("entropy",) and found.by == "optimiser step"
    assert stage_curves("sft", "sft", {}, most=9) is None


def test_tokens_are_speed_by_time_and_not_of_the_time_between_attempts() -> None:
    """There are 10 tokens/s over 2 s and 20 over 1 s. After 100 s without an attempt there are 5 over the 4 s since the
    second attempt began, which makes 60 tokens."""
    rows = [(1, 3_000, 10.0), (2, 4_000, 20.0), (3, 108_000, 5.0)]
    assert tokens_of({"tokens_per_second": rows}, [1_000, 104_000]) == pytest.approx(60.0)
    assert tokens_of({"loss": rows}, [0]) is None


def test_many_stages_show_fewer_curves_each() -> None:
    assert [most_of_each(count) for count in (1, 4, 9, 30, 500)] == [12, 12, 10, 3, 2]
    assert 30 * most_of_each(30) <= MOST_FIGURES


def test_every_curve_that_is_drawn_is_a_metric() -> None:
    assert set(ORDER) <= {metric.name for metric in METRICS}
    assert len(set(ORDER)) == len(ORDER)


def test_the_trend_is_the_mean_of_equal_parts() -> None:
    """In three equal parts, steps 1 to 9 have means 2, 20 and 200 at steps 2, 5 and 8."""
    values = [1.0, 2.0, 3.0, 10.0, 20.0, 30.0, 100.0, 200.0, 300.0]
    points = [(step, value) for step, value in enumerate(values, start=1)]
    assert trend(points, 3) == ((2, 2.0), (5, 20.0), (8, 200.0))
    assert trend(points[:6], 3) == ()


def test_the_mean_score_of_a_reward_model_comes_last() -> None:
    told = {name: [(1, 0, 1.0)] for name in ("score_mean", "loss", "grad_norm")}
    for kind, first in (("reward_model", "loss"), ("policy_optimization", "score_mean")):
        found = stage_curves("x", kind, told, most=9)
        assert found is not None and found.curves[0].metric == first


def test_every_curve_has_a_title_and_says_what_to_look_for() -> None:
    for name in ORDER:
        title, note = title_and_note(name, "policy_optimization")
        assert title != name and note
    wanted = {
        "score_mean": "Reward", "kl_to_reference": "KL", "entropy": "Entropy", "response_length_mean": "length",
        "explained_variance": "Explained variance", "clip_fraction": "Clip fraction", "validation_score": "Held-out score",
    }  # fmt: skip
    for name, word in wanted.items():
        assert word in title_and_note(name, "policy_optimization")[0]
    assert set(wanted) <= set(ORDER[:16])


def test_only_of_a_policy_that_learns_from_its_samples_the_reward_is_to_rise() -> None:
    assert "rises" in title_and_note("score_mean", "policy_optimization")[1]
    assert "rises" not in title_and_note("score_mean", "value_pretraining")[1]
    assert "rises" not in title_and_note("score_mean", "reward_model")[1]


def test_a_curve_is_drawn_once_and_again_when_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is drawn before a run's end and written after it."""
    drawn: list[str] = []

    def svg(_: object, *, label: str, **options: object) -> str:
        drawn.append(label)
        return f"<svg>{label}</svg>"

    monkeypatch.setattr(plots, "svg", svg)
    short = Curve(metric="loss", unit="nats", meaning="", points=((0, 3.0), (1, 2.0)), total=2)
    grown = Curve(metric="loss", unit="nats", meaning="", points=((0, 3.0), (1, 2.0), (2, 1.0)), total=3)
    stages = [
        StageCurves(step="drawn once", kind="sft", by="optimiser step", curves=(curve,))
        for curve in (short, short, grown, grown)
    ]
    pages = [plots.curve_plots(stage) for stage in stages]
    assert len(drawn) == 2
    assert pages[0] == pages[1] != pages[2] == pages[3]
    assert "3 → 1" in pages[3][0].note


def test_a_curve_shows_where_its_guard_fired() -> None:
    """The curve of a guard that fired is drawn first. A firing of a watch is drawn on the curves that it compared, not
    on the number of falls.
    """
    told = {
        name: [(step, 0, float(step)) for step in range(1, 6)]
        for name in (
            "score_mean",
            "validation_score",
            "validation_watch_score",
            "watch_falls",
            "entropy",
            "ratio",
        )
    }
    firings = [
        Firing(guard=Guard(metric="ratio", above=1.0), step=3, values=(1.0,)),
        Firing(guard=Guard(metric="ratio", above=2.0), step=3, values=(1.0,)),
        Firing(guard=Guard(metric="watch_falls", above=1.0, over=1), step=5, values=(2.0,)),
    ]
    found = stage_curves("x", "policy_optimization", told, most=4, firings=firings)
    assert found is not None
    assert [(curve.metric, curve.fired) for curve in found.curves] == [
        ("ratio", (3,)),
        ("validation_watch_score", (5,)),
        ("validation_score", (5,)),
        ("score_mean", ()),
    ]


def test_graded_scores_are_drawn_after_the_rewards_with_their_spread() -> None:
    told = {
        "entropy": [(1, 0, 3.0), (2, 0, 2.0)],
        "score_mean": [(1, 0, 1.0), (2, 0, 2.0)],
        "score_mean_rubric.style": [(1, 0, 0.5), (2, 0, 0.75)],
        "score_p10_rubric.style": [(1, 0, 0.25), (2, 0, 0.5)],
        "score_p50_rubric.style": [(1, 0, 0.5), (2, 0, 0.75)],
        "score_p90_rubric.style": [(1, 0, 1.0), (2, 0, 2.0)],
        "score_mean_reward": [(1, 0, 1.0)],
    }
    found = stage_curves("policy", "policy_optimization", told, most=9)
    assert found is not None
    assert [curve.metric for curve in found.curves] == ["score_mean", "score_mean_rubric.style", "entropy"]
    assert found.curves[1].band == ((1, 0.25, 1.0), (2, 0.5, 2.0))
    assert found.curves[0].band == found.curves[2].band == ()
    assert found.others == ("score_mean_reward",), "a model's scores are reported and not drawn, as ever"
    [plot] = [plot for plot in plots.curve_plots(found) if "rubric" in plot.title]
    assert plot.title == "Score rubric.style (score_mean_rubric.style)"
    assert "the band is from the 10th to the 90th percentile" in plot.note
