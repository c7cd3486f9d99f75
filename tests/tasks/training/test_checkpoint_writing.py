"""Checkpoints that are written beside training have the bytes of those between two steps, and a kill at any moment leaves a usable one."""

import errno
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tasks.training.test_attempt import TOTAL, sft_job, train
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers.stage_process import explain
from vantage.tasks.training import (
    attempt,
    checkpoint_folders,
    checkpoint_writing,
    checkpoints,
    preemption,
)
from vantage.tasks.training.checkpoint_folders import committed, latest
from vantage.tasks.training.scratch import CHECKPOINTS, read_committed

SECONDS = 30.0
"""Longest wait for another thread; one that never comes fails the test."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: those of OpenMP do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return the result of a stage that nothing interrupted, whose checkpoints were written between two steps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint_writing, "SHARE_OF_MEMORY", 0.0)
        return train(sft_job(tmp_path_factory.mktemp("whole"), checkpoint_every=2))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def bytes_written(
    folder: Path, *, share: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[bytes, bytes]], set[str]]:
    """Return both files of all checkpoints of a stage, in order, and the names of the threads that wrote them."""
    written, threads = [], set()
    commit = checkpoint_folders.commit

    def remembered(*args: Any, **options: Any) -> checkpoints.Checkpoint:
        made = commit(*args, **options)
        state = re.sub(
            rb'"journal_offset":\d+', b"", (made.folder / "state.json").read_bytes()
        )  # leave out times
        written.append(((made.folder / "tensors.safetensors").read_bytes(), state))
        threads.add(threading.current_thread().name)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "commit", remembered)
        patched.setattr(checkpoint_writing, "SHARE_OF_MEMORY", share)
        train(sft_job(folder, checkpoint_every=1))
    return written, threads


def test_they_have_the_bytes_of_those_that_are_written_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, in_turn = bytes_written(tmp_path / "plain", share=0.0, monkeypatch=monkeypatch)
    beside, in_threads = bytes_written(tmp_path / "beside", share=0.5, monkeypatch=monkeypatch)
    assert len(plain) == len(set(plain)) == TOTAL
    assert beside == plain
    assert in_turn == {"MainThread"}
    assert in_threads == {"MainThread", "write-checkpoint"}, "the last one is complete before the stage ends"


def slowed(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None], *, share: float = 0.5
) -> list[int]:
    """Have ``before`` called with the number of each write of tensors, before it; returns the writes that are in flight."""
    in_flight: list[int] = []
    real, numbers = checkpoints.save_file, iter(range(100))

    def write(*args: Any) -> None:
        number = next(numbers)
        in_flight.append(number)
        before(number)
        real(*args)
        in_flight.remove(number)

    monkeypatch.setattr(checkpoints, "save_file", write)
    monkeypatch.setattr(checkpoint_writing, "SHARE_OF_MEMORY", share)
    return in_flight


def steps_seen(monkeypatch: pytest.MonkeyPatch, seen: Callable[[int], None]) -> None:
    finish = attempt.Attempt.finish_step

    def finished(self: attempt.Attempt[Any], *args: Any, **options: Any) -> None:
        finish(self, *args, **options)
        seen(self.step)

    monkeypatch.setattr(attempt.Attempt, "finish_step", finished)


def test_steps_go_on_while_a_slow_disk_writes_and_the_next_write_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Tensor]
) -> None:
    went_on, at_once, waited = threading.Event(), [], []

    def before(number: int) -> None:
        at_once.append(len(in_flight))
        if number == 0:
            waited.append(went_on.wait(SECONDS))

    in_flight = slowed(monkeypatch, before)
    # step 1 of 0 to 6 is saved while steps 2 and 3 train; the write after step 3 waits for it
    steps_seen(monkeypatch, lambda step: went_on.set() if step == 3 else None)
    assert_same(train(sft_job(tmp_path, checkpoint_every=2)), whole)
    assert waited == [True], "training waited for the disk"
    assert at_once == [1, 1, 1, 1]
    assert [each.step for each in committed(tmp_path / CHECKPOINTS)] == [6, 7]


def test_a_copy_that_does_not_fit_into_memory_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Tensor]
) -> None:
    bytes_to_copy: set[int] = set()
    real = checkpoint_writing.has_room
    threads: list[str] = []

    def has_room(num_bytes: int) -> bool:
        bytes_to_copy.add(num_bytes)
        return real(num_bytes)

    slowed(monkeypatch, lambda _: threads.append(threading.current_thread().name))
    monkeypatch.setattr(checkpoint_writing, "has_room", has_room)
    weights = 4 * (4 * 8 + 8 + 8 + 1)
    for free, expected in ((2 * 3 * weights, "MainThread"), (2**40, "write-checkpoint")):
        threads.clear()
        monkeypatch.setattr(checkpoint_writing, "available_memory", lambda free=free: free)
        assert_same(train(sft_job(tmp_path / str(free), checkpoint_every=2)), whole)
        assert threads == [expected] * 3 + ["MainThread"]
    [counted] = bytes_to_copy
    # weights and both moments, and beside them four counters of steps, a few numbers of two groups and a flag for each
    assert 3 * weights < counted < 3 * weights + 300, "the best weights are not copied"


# Errors


def test_a_full_disk_ends_the_stage_as_it_does_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Tensor]
) -> None:
    failures = {}
    for share in (0.0, 0.5):
        job = sft_job(tmp_path / str(share), checkpoint_every=2)
        first = job.scratch / CHECKPOINTS / "checkpoint-00000002"

        def full(descriptor: int, first: Path = first) -> None:
            if first.exists() and "/saving" in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_writing, "SHARE_OF_MEMORY", share)
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left on device") as failed:
                train(job)
        failures[share] = explain(failed.value)
        found = latest(job.scratch / CHECKPOINTS)
        assert found is not None and found.step == 2, "the last good one stays"
        assert_same(train(job), whole)
    assert failures[0.0] == failures[0.5]
    assert failures[0.5].exit_code == ExitCode.STORAGE


def test_a_disk_that_was_full_for_a_moment_ends_the_stage_before_its_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def full_once(number: int) -> None:
        if number == 0:
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wait(step: int) -> None:
        if step == 2:  # the checkpoint after two steps is being written
            assert failed.wait(SECONDS)
            for thread in threading.enumerate():
                if thread.name == "write-checkpoint":
                    thread.join(SECONDS)
        seen.append(step)

    seen: list[int] = []
    slowed(monkeypatch, full_once)
    steps_seen(monkeypatch, wait)
    with pytest.raises(OSError, match="No space left on device"):
        train(sft_job(tmp_path, checkpoint_every=2))
    assert seen == [0, 1, 2]
    assert latest(tmp_path / CHECKPOINTS) is None


def test_a_file_that_may_not_grow_is_reported_from_the_thread(tmp_path: Path) -> None:
    job = sft_job(tmp_path, checkpoint_every=2)

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        try:
            train(job)
        except Exception as error:
            os._exit(explain(error).exit_code)

    assert os.waitstatus_to_exitcode(in_child(fill)) == ExitCode.STORAGE


def test_an_error_of_the_loop_is_not_hidden_by_that_of_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = threading.Event()

    def broken(_: int) -> None:
        raised.wait(SECONDS)
        raise OSError(errno.EIO, "the disk")

    def fail(step: int) -> None:
        if step == 2:
            raised.set()
            raise RuntimeError("the loop")

    slowed(monkeypatch, broken)
    steps_seen(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="the loop"):
        train(sft_job(tmp_path, checkpoint_every=2))


# Requests to stop


def test_a_request_to_stop_waits_for_the_write_in_flight_and_saves_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Tensor]
) -> None:
    job, asked = sft_job(tmp_path, checkpoint_every=2), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(preemption, "_signals_received", 0)

        def ask(step: int) -> None:
            if step == 2:
                preemption.request()
                threading.Timer(0.2, asked.set).start()  # the write is in flight when the request is noticed

        slowed(patched, lambda number: None if number else [None, asked.wait(SECONDS)][0])
        steps_seen(patched, ask)
        with pytest.raises(preemption.Preempted, match="stopped on request after step 3 of 7"):
            train(job)
    assert [each.step for each in committed(tmp_path / CHECKPOINTS)] == [2, 3]
    assert read_committed(tmp_path)[0] == 3
    assert_same(train(job), whole)


# Kills


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a fork of this process; returns its wait status, 0 where it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


POINTS = {
    "before the folder": (checkpoints, "saving_folder"),
    "before the tensors": (checkpoints, "save_file"),
    "before the state": (checkpoints, "write_file"),
    "before the commit": (checkpoints, "commit"),
    "before the seal": (checkpoint_folders, "seal"),
    "before the move": (checkpoint_folders, "move_folder"),
    "after the move": (checkpoint_folders, "move_folder"),
    "before it is recorded": (checkpoint_writing, "write_committed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("number", [0, 2])
def test_killed_in_a_write_it_goes_on_from_the_last_complete_one_with_the_same_bits(
    tmp_path: Path, point: str, number: int, whole: dict[str, Tensor]
) -> None:
    module, name = POINTS[point]
    real, writes = getattr(module, name), iter(range(100))
    job = sft_job(tmp_path, checkpoint_every=2)

    def kill(*args: Any, **options: Any) -> Any:
        is_of_thread = threading.current_thread() is not threading.main_thread()
        if is_of_thread and next(writes) == number:
            if point == "after the move":
                real(*args, **options)
            if name == "save_file":  # a part of the file is there
                args[1].write_bytes(b"\x08")
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    def work() -> None:
        vars(module)[name] = kill
        train(job)

    assert os.waitstatus_to_exitcode(in_child(work)) == -signal.SIGKILL
    found = latest(tmp_path / CHECKPOINTS)
    at_most = 2 * number + (2 if point in ("after the move", "before it is recorded") else 0)
    assert (0 if found is None else found.step) == at_most
    assert not list((tmp_path / CHECKPOINTS).glob("damaged-*"))
    assert_same(train(job), whole)
    assert not (tmp_path / CHECKPOINTS / checkpoint_folders.SAVING).exists()


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    tmp_path: Path, whole: dict[str, Tensor]
) -> None:
    job, chosen = sft_job(tmp_path, checkpoint_every=2), random.Random(7)

    def work() -> None:
        for name in ("save_file", "write_file", "commit"):
            real = getattr(checkpoints, name)
            vars(checkpoints)[name] = lambda *args, real=real, **more: [
                time.sleep(0.02),
                real(*args, **more),
            ][1]
        train(job)

    killed = 0
    for _ in range(12):
        child = os.fork()
        if child == 0:
            try:
                work()
            finally:
                os._exit(0)
        time.sleep(chosen.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if latest(tmp_path / CHECKPOINTS) is not None and killed >= 8:
            break
    assert killed > 3
    assert_same(train(job), whole)
