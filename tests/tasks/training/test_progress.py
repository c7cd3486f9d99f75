"""The progress file: what whoever takes a glance finds."""

import math
import os
from pathlib import Path

import pytest

from tasks.training import progress as progress_module
from tasks.training.progress import Progress, StageProgress, read_progress


class Clock:
    """A monotonic clock and a wall clock that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "clock", clock)
    return clock


def shown(path: Path) -> StageProgress:
    progress = read_progress(path)
    assert progress is not None
    return progress


def test_progress_tells_what_a_person_wants_to_see(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "progress.json"
    assert read_progress(path) is None
    progress = Progress(path, total=400, phase="training")
    clock.now += 1
    progress.update(
        120, metrics={"loss": 0.61, "accuracy": None}, headline="loss", tokens_per_second=21_034.0
    )
    assert shown(path) == StageProgress(
        phase="training",
        step=120,
        total=400,
        metrics={"loss": 0.61, "accuracy": None},
        headline="loss",
        tokens_per_second=21_034.0,
        started=1.7e9 + 100,
        updated=1.7e9 + 101,
    )
    assert shown(path).value == 0.61
    clock.now += 1
    progress.update(121, metrics={"loss": math.nan})
    assert shown(path).value is None
    assert (shown(path).headline, shown(path).tokens_per_second) == ("loss", 21_034.0)


def test_progress_is_written_five_times_a_second_at_most(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "progress.json"
    progress = Progress(path, total=10_000, phase="training")
    written = []
    for step in range(1, 1001):  # a second, a step a millisecond
        clock.now += 0.001
        progress.update(step)
        if shown(path).step == step:
            written.append(step)
    assert 4 <= len(written) <= 5
    assert written[-1] >= 800


def test_a_new_phase_and_the_last_step_are_always_written(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "progress.json"
    progress = Progress(path, total=3, phase="training")
    progress.update(1)
    assert shown(path).step == 0
    progress.update(2, phase="validating")
    assert (shown(path).step, shown(path).phase) == (2, "validating")
    progress.update(3, phase="validating")
    assert shown(path).step == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_progress_file_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "progress.json").write_bytes(content)
    assert read_progress(tmp_path / "progress.json") is None


def test_a_reader_never_sees_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    path = tmp_path / "progress.json"
    progress = Progress(path, total=9, phase="training")
    replace, seen = os.replace, []

    def look_and_replace(source: Path, target: Path) -> None:
        seen.append(shown(path).step)  # the new one is written, and not yet in place
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_and_replace)
    for step in (1, 2, 3):
        clock.now += 1
        progress.update(step)
    assert seen == [0, 1, 2]
    assert shown(path).step == 3
