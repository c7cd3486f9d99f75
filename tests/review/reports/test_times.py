"""The report shows where the time of a stage went: shares, percentiles and bars equal hand-worked ones."""

from dataclasses import replace

import pytest

from vantage.review.reports.curves import stage_curves
from vantage.review.reports.gathered import PhaseTime
from vantage.review.reports.plots import time_plots
from vantage.review.reports.sections import OF_VLLM, SERVERS, SHORTENED_BY, times_table
from vantage.review.reports.times import MOST_BARS, times_of
from vantage.runs.history import Row
from vantage.schemas.metric_names import PHASES
from vantage.schemas.recipe.rollout import Ahead, Sampling


def rows_of(values: list[float]) -> list[Row]:
    return [(step, 1000 * step, value) for step, value in enumerate(values, start=1)]


def measured(**seconds: list[float]) -> dict[str, list[Row]]:
    count = len(next(iter(seconds.values())))
    return {f"seconds_{phase}": rows_of(seconds.get(phase, [0.0] * count)) for phase in PHASES}


def test_shares_are_means_over_the_iterations() -> None:
    """Sampling takes 3 of 4 s and 1 of 10 s. Its mean share is 0.425, and not 4/14."""
    found = times_of(measured(sampling=[3.0, 1.0], updating=[1.0, 9.0]))
    assert found is not None
    assert (found.iterations, found.seconds, found.beside) == (2, 7.0, None)
    assert found.phases == (
        PhaseTime("sampling", 2.0, pytest.approx(0.425), pytest.approx(0.165), pytest.approx(0.685)),  # type: ignore[arg-type]
        PhaseTime("updating", 5.0, pytest.approx(0.575), pytest.approx(0.315), pytest.approx(0.835)),  # type: ignore[arg-type]
    )
    assert found.bars == (("1", (3.0, 1.0)), ("2", (1.0, 9.0)))


def test_many_iterations_become_bars_of_equal_parts() -> None:
    found = times_of(measured(sampling=[float(step) for step in range(1, 49)]))
    assert found is not None
    assert len(found.bars) == MOST_BARS
    assert (found.bars[0], found.bars[-1]) == (("1–2", (1.5,)), ("47–48", (47.5,)))


def test_nothing_is_shown_of_a_stage_that_measured_no_times() -> None:
    """A stage that an earlier version computed has no times, and one whose rows lack a phase is not shown either."""
    assert times_of({"loss": rows_of([1.0])}) is None
    partly = measured(sampling=[1.0])
    del partly["seconds_other"]
    assert times_of(partly) is None


def test_the_section_has_a_plot_and_a_table() -> None:
    rows = {
        **measured(sampling=[3.0, 3.5], waiting=[1.0, 0.5], updating=[2.0, 2.0]),
        "score_mean": rows_of([0.1, 0.2]),
        "entropy": rows_of([0.4, 0.3]),
        "seconds_beside": rows_of([0.0, 2.0])[1:],
    }
    stage = stage_curves("policy", "policy_optimization", rows, most=1, rollout=Ahead(ahead=1))
    assert stage is not None
    [plot] = time_plots(stage)
    assert plot.title == "Seconds of an iteration"
    assert plot.note == "mean 6 s: sampling 54 %, waiting 12 %, updating 33 %"
    table = times_table(stage)
    assert "Means of 2 of its iterations, 6 s each." in table
    assert "Beside them, 2 s an iteration" in table
    assert "rollout.ahead" not in table, "it has that already"
    before = times_table(replace(stage, rollout=Ahead()))
    assert "rollout.ahead: 1, whose responses are one update old" in before
    assert stage.others == ("entropy",), "times are shown here, and entropy is neither drawn nor a time"


LOOP_ADVICE = "rollout.engine: vllm; a larger rollout.max_rows"
AHEAD_ADVICE = "rollout.ahead: 1, whose responses are one update old"
MORE = "more processes that sample or judge"


@pytest.mark.parametrize(
    ("rollout", "sampling", "waiting"),
    [
        pytest.param(Sampling(), LOOP_ADVICE, MORE, id="a kind that never samples ahead"),
        pytest.param(Ahead(), f"{LOOP_ADVICE}; {AHEAD_ADVICE}", MORE, id="the loop"),
        pytest.param(Ahead(ahead=1), LOOP_ADVICE, MORE, id="the loop, ahead"),
        pytest.param(Ahead(engine="vllm"), OF_VLLM + SERVERS, MORE, id="vLLM in the process"),
        pytest.param(Ahead(engine="vllm", servers=1), OF_VLLM, f"{MORE}; {AHEAD_ADVICE}", id="servers"),
        pytest.param(Ahead(engine="vllm", servers=1, ahead=1), OF_VLLM, MORE, id="servers, ahead"),
    ],
)
def test_no_setting_is_offered_that_the_stage_has_or_refuses(
    rollout: Sampling, sampling: str, waiting: str
) -> None:
    rows = measured(sampling=[3.0], waiting=[1.0])
    stage = stage_curves("policy", "policy_optimization", {**rows, "score_mean": rows_of([0.1])}, most=4)
    assert stage is not None
    table = times_table(replace(stage, rollout=rollout))
    assert f">{sampling}<" in table and f">{waiting}<" in table


def test_every_phase_has_a_remedy() -> None:
    assert SHORTENED_BY.keys() == set(PHASES)
