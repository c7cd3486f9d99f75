"""Stages of several ranks run under real torchrun agents with gloo ranks; ``ranked_stages`` has what they compute."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from tests.attempts.launchers.test_local_process import is_alive
from tests.support.ranked_stages import MISBEHAVES_AFTER, STEPS
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.launchers.local_process import LocalProcess
from vantage.attempts.machine import Machine, num_ranks
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.recipe.stages_on_data import SupervisedFineTuning
from vantage.schemas.recipe.work import ImportVerifier, Work
from vantage.schemas.records.attempt import Failure, Share
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.training.scratch import read_committed

ROOT = Path(__file__).parents[3]
TRAIN = "tests.support.ranked_stages.train"


def work_of(ranks: int | None, **resources: Any) -> Work:
    return resolve_work(
        SupervisedFineTuning.model_validate(
            {
                "kind": "sft",
                "data": "demonstrations",
                "learning_rate": 0.05,
                "checkpoint_every": 5,
                "resources": {"distributed": {"ranks": ranks}, **resources},
            }
        )
    )


def job_in(folder: Path, *, ranks: int, attempt: int = 1) -> StageJob:
    (folder / "scratch").mkdir(exist_ok=True, parents=True)
    return StageJob(
        run_id="r1",
        name="sft",
        attempt=attempt,
        stage_key="0" * 64,
        seed=17,
        work=work_of(ranks),
        generation=Generation(),
        scratch=folder / "scratch",
        output=folder / "output",
        threads=2,
    )


def launch(folder: Path, *, ranks: int, **options: Any) -> StageResult:
    job = job_in(folder, ranks=ranks, attempt=options.pop("attempt", 1))
    return LocalProcess().launch(job, log=folder / "log.txt", function=TRAIN, **options)


def failure(folder: Path, **options: Any) -> tuple[str, int, str]:
    with pytest.raises(StageFailed) as caught:
        launch(folder, **options)
    found = caught.value.failure
    return found.cause, found.exit_code, found.message


def misbehaves(folder: Path, how: str) -> None:
    """Have a rank of the next attempt misbehave; ``ranked_stages.misbehave`` says how."""
    (folder / "scratch").mkdir()
    (folder / "scratch" / "misbehaves").write_text(how)


def is_misbehaving(folder: Path) -> bool:
    return not (folder / "scratch" / "misbehaves").exists()


def weights(result: StageResult) -> list[float | None]:
    return [value for name, value in result.metrics.items() if name.startswith("weight")]


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted((folder / "scratch").glob("pid-*"))]


def wait_for_end(processes: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline, "a rank outlived its agent"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> StageResult:
    """Return the result of the stage in one process."""
    return launch(tmp_path_factory.mktemp("alone"), ranks=1)


@pytest.mark.slow
def test_two_ranks_make_what_one_process_makes(alone: StageResult, tmp_path: Path) -> None:
    result = launch(tmp_path, ranks=2)
    assert (alone.metrics["ranks"], result.metrics["ranks"]) == (1, 2)
    assert (alone.metrics["threads"], result.metrics["threads"]) == (2, 1), "ranks share the stage's CPUs"
    assert weights(result) == pytest.approx(weights(alone), abs=1e-5)
    wait_for_end(pids(tmp_path))


@pytest.mark.slow
def test_after_a_request_to_stop_every_rank_has_saved_at_one_step(alone: StageResult, tmp_path: Path) -> None:
    """The next attempt goes on from that step, on another number of ranks."""
    misbehaves(tmp_path, "waits to be stopped")
    stop = threading.Event()
    cause, code, message = failure(
        tmp_path, ranks=2, stop=stop, on_poll=lambda: stop.set() if is_misbehaving(tmp_path) else None
    )
    assert (cause, code) == ("preempted", ExitCode.RESUME)
    step, _ = read_committed(tmp_path / "scratch")
    assert step == MISBEHAVES_AFTER + 1
    assert f"after step {step} of {STEPS}" in message
    result = launch(tmp_path, ranks=3, attempt=2)
    assert (result.metrics["began"], result.metrics["ranks"]) == (step, 3)
    assert weights(result) == pytest.approx(weights(alone), abs=1e-5)


@pytest.mark.slow
def test_when_a_rank_is_killed_the_next_attempt_goes_on_from_the_checkpoint(
    alone: StageResult, tmp_path: Path
) -> None:
    misbehaves(tmp_path, "killed")
    cause, code, _ = failure(tmp_path, ranks=2)
    assert (cause, code) == ("killed", ExitCode.RESUME)
    wait_for_end(pids(tmp_path))
    result = launch(tmp_path, ranks=2, attempt=2)
    assert result.metrics["began"] == 5
    assert weights(result) == pytest.approx(weights(alone), abs=1e-5)


@pytest.mark.slow
def test_when_a_rank_hangs_the_watchdog_writes_where_all_stand_and_kills_them(tmp_path: Path) -> None:
    misbehaves(tmp_path, "hangs")
    cause, code, message = failure(tmp_path, ranks=2, hang_seconds=10.0)  # beside others, steps take seconds
    assert (cause, code) == ("hung", ExitCode.HUNG)
    assert "no progress for 10 s" in message
    log = (tmp_path / "log.txt").read_text()
    assert "in misbehave" in log, "the rank that hangs"
    assert "in add_gradients" in log, "the rank that waits for it"
    wait_for_end(pids(tmp_path))


@pytest.mark.slow
def test_a_rank_that_a_signal_has_stopped_is_named_and_its_stacks_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits for it and leaves its CPU idle, which alone would not be reported for 15 minutes."""
    monkeypatch.setattr("vantage.attempts.launchers.watchdog.STOPPED_SECONDS", 12.0)
    misbehaves(
        tmp_path, "hangs"
    )  # so that it does not end the stage when it is continued to write its stacks

    def stop_the_rank_that_hangs() -> None:
        if is_misbehaving(tmp_path):
            stop_the_last_rank(tmp_path)

    cause, code, message = failure(tmp_path, ranks=2, hang_seconds=600.0, on_poll=stop_the_rank_that_hangs)
    assert (cause, code) == ("hung", ExitCode.HUNG)
    assert "a signal has stopped its rank 1 (SIGSTOP), and nobody continued it for 12 s" in message
    log = (tmp_path / "log.txt").read_text()
    assert "in misbehave" in log, "the rank that was stopped"
    assert "in add_gradients" in log, "the rank that waits for it"
    wait_for_end(pids(tmp_path))


@pytest.mark.slow
def test_a_rank_that_is_continued_in_time_changes_nothing(alone: StageResult, tmp_path: Path) -> None:
    def stop_it_for_a_while() -> None:
        if read_committed(tmp_path / "scratch")[0]:
            stop_the_last_rank(tmp_path, seconds=8.0)

    result = launch(tmp_path, ranks=2, hang_seconds=600.0, on_poll=stop_it_for_a_while)
    assert (tmp_path / "stopped").exists()
    assert result.metrics["began"] == 0
    assert weights(result) == pytest.approx(weights(alone), abs=1e-5)


def stop_the_last_rank(folder: Path, *, seconds: float | None = None) -> None:
    """Stop the last of two ranks, once, and continue it when it is called after so many seconds; None: never."""
    mark, rank = folder / "stopped", int((folder / "scratch" / "pid-1").read_text())
    if not mark.exists():
        os.kill(rank, signal.SIGSTOP)
        mark.touch()
    elif seconds is not None and time.time() > mark.stat().st_mtime + seconds:
        with suppress(ProcessLookupError):  # the process has ended
            os.kill(rank, signal.SIGCONT)


@pytest.mark.slow
def test_the_error_of_one_rank_is_that_of_the_stage(tmp_path: Path) -> None:
    """The others only see that their connection broke."""
    misbehaves(tmp_path, "refuses")
    cause, code, message = failure(tmp_path, ranks=2)
    assert (cause, code) == ("refused", ExitCode.BAD_INPUT)
    assert message == "data.demonstrations: row 7 has no prompt; remove it"


@pytest.mark.slow
def test_ranks_die_with_the_process_that_started_the_stage(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.attempts.launchers.test_torchrun import launch\n"
        "launch(Path(sys.argv[1]), ranks=2)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 120
    while not read_committed(tmp_path / "scratch")[0]:
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.05)
    found = pids(tmp_path)
    assert len(found) == 2
    assert all(map(is_alive, found))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for_end(found)


def test_the_number_of_ranks_is_that_of_the_gpus_or_what_the_recipe_says() -> None:
    eight = Share(cpus=8, gpus=tuple("01234567"))
    assert num_ranks(work_of(None), eight) == 8
    assert num_ranks(work_of(None), Share(cpus=8)) == 1
    assert num_ranks(work_of(None, gpus=2), None) == 2
    assert num_ranks(work_of(3), Share(cpus=8)) == 3
    assert num_ranks(ImportVerifier.model_construct(), eight) == 1


def test_ranks_without_gpus_take_as_many_as_there_are_ranks_or_none() -> None:
    def gpus(machine: Machine, **resources: Any) -> int:
        return machine.share_of(Resources.model_validate(resources))[1]

    machine = Machine(cpus=4, gpus=("0", "1"))
    assert gpus(machine) == 1
    assert gpus(machine, distributed={"ranks": 2}) == 2
    assert gpus(machine, distributed={"ranks": 3}) == 0
    with pytest.raises(ValueError, match=r"compute on CPUs with resources\.distributed\.ranks=4 in place of"):
        gpus(machine, gpus=4)
    with pytest.raises(ValueError, match=r"gpus=2 and distributed\.ranks=3 differ"):
        Resources.model_validate({"gpus": 2, "distributed": {"ranks": 3}})


def ended_by(folder: Path, exitcode: int) -> ChildFailedError:
    """Return the agent's error for a rank that ended with this code and has written nothing."""
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=exitcode, error_file=str(folder / "none"))
    return ChildFailedError("stage", {1: failure})


@pytest.mark.parametrize(("exitcode", "expected"), [(-9, 137), (-15, 143), (3, 3)])
def test_ranks_share_the_threads_and_the_first_that_ends_gives_the_exit_code(
    exitcode: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is the rank's own, or a shell's number of the signal that ended the rank."""
    from vantage.attempts.launchers import torchrun

    job_file, launched = tmp_path / "scratch" / "attempt-1" / "job.json", []
    job_file.parent.mkdir(parents=True)

    def fail(config: LaunchConfig, _: object) -> Callable[..., None]:
        def launch(*arguments: object) -> None:
            launched.append((config.nproc_per_node, config.max_restarts, *arguments))
            raise ended_by(tmp_path, exitcode)

        return launch

    monkeypatch.setattr(torchrun, "elastic_launch", fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torchrun.faulthandler, "unregister", lambda _: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert torchrun.run_ranks(job_file, TRAIN, 3) == expected
    assert launched == [(3, 0, str(job_file), TRAIN, 2)]
    reported = Failure(exit_code=ExitCode.BAD_INPUT, cause="refused", message="row 7", remedy="remove it")
    job_file.with_name("failure.json").write_text(reported.model_dump_json())
    assert torchrun.run_ranks(job_file, TRAIN, 3) == ExitCode.BAD_INPUT
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun.run_ranks(job_file, TRAIN, 3)
    assert launched[-1][-1] == 1
