"""Processes that know nothing of each other share the GPUs of a machine: no GPU is held twice."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from vantage.flows.pools import share
from vantage.flows.pools.share import share_of_this_machine
from vantage.schemas.recipe.stage import Resources

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "LOCKS", tmp_path)
    monkeypatch.setattr(share, "_SECONDS_BETWEEN_TRIES", 0.01)


def taken(
    held: ExitStack, gpus: int, stop: threading.Event | None = None, of: tuple[str, ...] = GPUS
) -> tuple[str, ...] | None:
    wanted = share_of_this_machine(Resources(gpus=gpus), stop=stop or threading.Event(), gpus=of)
    got = held.enter_context(wanted)
    return None if got is None else got.gpus


def test_no_gpu_is_held_twice_and_one_that_is_given_back_is_free() -> None:
    with ExitStack() as first, ExitStack() as second:
        assert taken(first, 3) == ("GPU-a", "GPU-b", "GPU-c")
        assert taken(second, 1) == ("GPU-d",)
        first.close()
        assert taken(second, 2) == ("GPU-a", "GPU-b")


def test_a_gpu_is_the_same_by_its_number_and_by_its_uuid_and_from_every_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    lines = "".join(f"GPU {number}: H200 (UUID: {name})\n" for number, name in enumerate(GPUS))
    driver.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with ExitStack() as first, ExitStack() as second:
        assert taken(first, 1, of=("0",)) == ("GPU-a",)
        monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
        monkeypatch.setattr("tempfile.tempdir", None)
        assert taken(second, 1) == ("GPU-b",)
    with ExitStack() as held, pytest.raises(ValueError, match="more than this machine's 1"):
        taken(held, 2, of=("0", "GPU-a"))


def test_an_attempt_waits_for_all_of_its_gpus_and_is_not_overtaken() -> None:
    order: list[str] = []

    def want(name: str, gpus: int, done: threading.Event) -> None:
        with ExitStack() as held:
            taken(held, gpus)
            order.append(name)
            done.wait(5)

    many, one = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as threads, ExitStack() as held:
        taken(held, 2)
        threads.submit(want, "four", 4, many)
        while not _is_locked("turn"):
            pass
        threads.submit(want, "one", 1, one)
        assert order == []  # two GPUs are free, and the attempt that came first wants four
        held.close()
        while not order:
            pass
        assert order == ["four"]
        many.set()
        one.set()
    assert order == ["four", "one"]


def test_a_stop_ends_the_wait() -> None:
    stop = threading.Event()
    with ExitStack() as held, ExitStack() as other:
        taken(held, 4)
        threading.Timer(0.1, stop.set).start()
        assert taken(other, 1, stop) is None


def test_more_than_the_machine_has_is_refused() -> None:
    with ExitStack() as held, pytest.raises(ValueError, match="more than this machine's 4"):
        taken(held, 5)


def test_attempts_of_one_worker_share_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "available_cpus", lambda: 16)
    monkeypatch.setenv(share.SLOTS, "4")
    with share_of_this_machine(Resources(), stop=threading.Event(), gpus=()) as got:
        assert got is not None
        assert (got.cpus, got.gpus) == (4, ())
    with share_of_this_machine(Resources(cpus=2), stop=threading.Event(), gpus=()) as got:
        assert got is not None
        assert got.cpus == 2


def _is_locked(name: str) -> bool:
    from vantage.storage.durable_files import open_lock, try_lock

    [folder] = share.LOCKS.glob("vantage-gpus-*")
    descriptor = open_lock(folder / f"{name}.lock")
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)
