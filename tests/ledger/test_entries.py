"""The operations of a run add up to its entries."""

import pytest

from tests.ledger.told_operations import (
    FINISH_STAGE,
    OPEN_RUN,
    OPEN_STAGE,
    REUSE,
    entry,
    policy,
)
from vantage.ledger.entries import apply_operation, new_rows
from vantage.ledger.operations import LogMetrics


def test_a_metric_is_told_once_a_step_whatever_is_passed_again() -> None:
    told = entry(
        OPEN_RUN, OPEN_STAGE, LogMetrics(stage="sft", rows=(("loss", 2.0, 10, 0), ("loss", 1.0, 20, 1)))
    )
    again = [("loss", 2.0, 10, 0), ("loss", 1.0, 20, 1), ("loss", 0.9, 31, 1), ("loss", 0.5, 30, 2)]
    assert new_rows(told, "sft", again) == [("loss", 0.5, 30, 2)]
    assert new_rows(told, "reward", again[:1]) == [("loss", 2.0, 10, 0)]
    assert new_rows(told, "sft", [("kl", 0.1, 10, 0)]) == [("kl", 0.1, 10, 0)]


def test_an_artifact_of_this_runs_own_dead_attempt_is_completed_and_not_reused() -> None:
    assert entry(OPEN_RUN, OPEN_STAGE, OPEN_RUN, REUSE).stages["sft"].outcome == "completed"
    assert entry(OPEN_RUN, REUSE).stages["sft"].outcome == "reused"
    assert entry(OPEN_RUN, REUSE, OPEN_RUN, REUSE).stages["sft"].outcome == "reused"


def test_operations_that_cannot_come_here_say_what_has_to_come_first() -> None:
    with pytest.raises(ValueError, match="finish_stage before open_run"):
        apply_operation(None, FINISH_STAGE)
    with pytest.raises(ValueError, match="stage 'sft' was never opened in run 0001-tiny-abcdef"):
        entry(OPEN_RUN, FINISH_STAGE)


def test_what_a_run_has_finished_stays_finished_when_it_finds_it_again() -> None:
    """A run that is taken over finds its own artifact in the store: nothing has happened to the stage since."""
    for outcome in ("completed", "gate_closed"):
        finished = FINISH_STAGE.model_copy(update={"outcome": outcome})
        stage = entry(OPEN_RUN, OPEN_STAGE, finished, OPEN_RUN, REUSE).stages["sft"]
        assert (stage.outcome, stage.made) == (outcome, FINISH_STAGE.time)
    again = FINISH_STAGE.model_copy(update={"time": 9})
    assert (
        entry(OPEN_RUN, OPEN_STAGE, FINISH_STAGE, OPEN_STAGE, again).stages["sft"].made == FINISH_STAGE.time
    )
    other = again.model_copy(update={"artifact": policy("other")})
    assert entry(OPEN_RUN, OPEN_STAGE, FINISH_STAGE, OPEN_STAGE, other).stages["sft"].made == 9
    closed = other.model_copy(update={"outcome": "gate_closed"})
    assert entry(OPEN_RUN, OPEN_STAGE, closed, OPEN_RUN, REUSE).stages["sft"].outcome == "completed"
