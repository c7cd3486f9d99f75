"""A limit of time ends an attempt with its state saved, and the next attempt goes on to the same bits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers.stage_process import explain
from vantage.schemas.recipe.stage import Resources
from vantage.tasks import stages
from vantage.tasks.stages import run_stage
from vantage.tasks.training import preemption
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.preemption import TimeIsUp
from vantage.tasks.training.scratch import read_committed

Contents = Callable[[Path], dict[str, bytes]]


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_signals_received", 0)


def test_the_attempt_saves_what_it_has_and_the_next_one_ends_with_the_same_bits(
    pipeline: Any, contents: Contents, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The limit passes in the third step: the clock is the test's."""
    limited = Resources(max_seconds=1000.0)
    whole = pipeline.job("sft", checkpoint_every=100)
    expected = run_stage(whole)
    job = pipeline.job("sft", checkpoint_every=100, resources=limited, folder=tmp_path)
    started: list[Timer] = []
    with monkeypatch.context() as patched:
        patched.setattr(preemption.threading, "Timer", lambda *given: Timer(started, *given))
        finish = Attempt.finish_step

        def finishing(self: Any, metrics: Mapping[str, float], **others: Any) -> None:
            finish(self, metrics, **others)
            if self.step == 2:
                started[0].pass_time()

        patched.setattr(Attempt, "finish_step", finishing)
        with pytest.raises(
            TimeIsUp, match="resources.max_seconds=1000 has passed; stopped after step 3 of"
        ) as error:
            run_stage(job)
    assert (started[0].seconds, started[0].is_cancelled) == (1000.0, True)
    assert read_committed(job.scratch)[0] == 3
    failure = explain(error.value)
    assert (failure.exit_code, failure.cause) == (ExitCode.RESUME, "time")
    assert "raise the limit" in failure.remedy

    monkeypatch.setattr(preemption, "_signals_received", 0)
    again = pipeline.job("sft", checkpoint_every=100, resources=limited, folder=tmp_path)
    assert run_stage(again) == expected
    assert contents(again.output) == contents(whole.output)


class Timer:
    """Stands for ``threading.Timer``: its time passes when the test has it pass."""

    daemon = False

    def __init__(self, started: list["Timer"], seconds: float, call: Callable[[], None]) -> None:
        self.seconds, self.call, self.is_cancelled = seconds, call, False
        self._started = started

    def start(self) -> None:
        self._started.append(self)

    def cancel(self) -> None:
        self.is_cancelled = True

    def pass_time(self) -> None:
        self.call()


@pytest.mark.parametrize(
    ("resources", "gpus", "expected"),
    [
        ({}, 8, (None, "")),
        ({"max_seconds": 60}, 0, (60.0, "resources.max_seconds=60")),
        ({"max_gpu_hours": 4}, 8, (1800.0, "resources.max_gpu_hours=4 on 8 GPUs")),
        ({"max_gpu_hours": 4}, 0, (None, "")),
        ({"max_gpu_hours": 4, "max_seconds": 60}, 8, (60.0, "resources.max_seconds=60")),
        ({"max_gpu_hours": 0.01, "max_seconds": 60}, 1, (36.0, "resources.max_gpu_hours=0.01 on 1 GPUs")),
    ],
)
def test_the_tighter_limit_holds(
    pipeline: Any,
    monkeypatch: pytest.MonkeyPatch,
    resources: dict[str, float],
    gpus: int,
    expected: tuple[float | None, str],
) -> None:
    monkeypatch.setattr(stages, "_gpus", lambda: gpus)
    job = pipeline.job("sft", resources=Resources.model_validate(resources))
    assert stages._time_of(job) == expected


def test_time_that_does_not_pass_changes_nothing() -> None:
    with preemption.within_time(1000.0, "a limit"):
        assert not preemption.requested()
    assert str(preemption.preempted("step 3 of 7")) == "stopped on request after step 3 of 7"
