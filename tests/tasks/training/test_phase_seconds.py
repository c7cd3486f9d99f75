"""Seconds of the phases of a step equal hand-worked ones, and whole stages report them."""

from pathlib import Path

import pytest

from tests.tasks.golden_results import Results
from vantage.ledger.journal import read
from vantage.schemas.metric_names import PHASES, TIMES
from vantage.tasks.rollout import ahead
from vantage.tasks.training.phase_seconds import PhaseSeconds
from vantage.tasks.training.scratch import JOURNAL


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_lasts_until_the_next_one() -> None:
    clock = Clock()
    seconds = PhaseSeconds(clock)
    for phase, lasts in [
        ("sampling", 4.0),
        ("sampling", 1.0),
        ("waiting for verifiers", 2.0),
        ("scoring", 3.0),
        ("sampling", 2.0),
        ("computing values", 0.5),
        ("updating", 6.0),
        ("validation: sampling", 1.5),
        ("validation: waiting for verifiers", 0.25),
        ("watch: asking the judge", 0.25),
    ]:
        seconds.enter(phase)
        clock.now += lasts
    seconds.beside(7.0)
    found = seconds.taken()
    assert found == {
        "seconds_sampling": 7.0,
        "seconds_waiting": 2.0,
        "seconds_scoring": 3.0,
        "seconds_reading": 0.5,
        "seconds_updating": 6.0,
        "seconds_measuring": 2.0,
        "seconds_other": 0.0,
        "seconds_beside": 7.0,
        "waiting_share": pytest.approx(2.0 / 20.5),
    }
    clock.now += 0.5  # a checkpoint is saved
    seconds.enter("sampling")
    clock.now += 1.0
    found = seconds.taken()
    assert (found["seconds_other"], found["seconds_sampling"], found["seconds_updating"]) == (0.5, 1.0, 0.0)
    assert "seconds_beside" not in found


def test_what_was_before_the_first_step_does_not_count() -> None:
    clock = Clock()
    seconds = PhaseSeconds(clock)
    seconds.enter("sampling")
    clock.now += 50.0
    seconds.begin()
    clock.now += 1.0
    assert seconds.taken()["seconds_other"] == 1.0
    assert seconds.taken()["waiting_share"] == 0.0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("runs"))


def curves_of(results: Results, name: str) -> list[dict[str, float]]:
    return [entry.metrics for entry in read(results.of(name).job.scratch / JOURNAL)]


@pytest.mark.parametrize(
    ("name", "takes_time"),
    [
        ("policy_optimization: vapo", {"sampling", "scoring", "reading", "updating", "measuring"}),
        ("policy_optimization: dapo", {"sampling", "waiting", "updating"}),
        ("value_pretraining", {"sampling", "waiting", "scoring", "reading", "updating", "measuring"}),
        ("best_of_n", {"sampling", "waiting", "scoring", "updating", "measuring"}),
        ("rollout_collection", {"sampling", "waiting", "scoring"}),
        ("preference_collection", {"sampling", "waiting", "scoring"}),
    ],
)
def test_stages_that_sample_report_every_phase(name: str, takes_time: set[str], results: Results) -> None:
    steps = curves_of(results, name)
    assert all(set(TIMES) - {"seconds_beside"} <= step.keys() for step in steps)
    last = steps[-1]
    assert takes_time <= {phase for phase in PHASES if last[f"seconds_{phase}"] > 0}
    whole = sum(last[f"seconds_{phase}"] for phase in PHASES)
    assert last["waiting_share"] == pytest.approx(last["seconds_waiting"] / whole)


def test_stages_that_do_not_sample_report_none(results: Results) -> None:
    assert not [set(step) & set(TIMES) for step in curves_of(results, "sft") if set(step) & set(TIMES)]


def test_sampling_beside_training_is_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first iteration has nothing that was begun before it."""
    monkeypatch.setattr(ahead, "SECONDS_BETWEEN_REPORTS", 0.001)
    steps = curves_of(Results(tmp_path), "policy_optimization: sampled ahead")
    assert ["seconds_beside" in step for step in steps] == [False, True, True]
    assert all(step["seconds_beside"] > 0 for step in steps[1:])
    assert steps[0]["seconds_sampling"] > 0
