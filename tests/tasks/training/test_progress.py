"""The progress file is written rarely enough, and at any moment a reader finds it whole and up to date."""

import math
import os
import time
from pathlib import Path

import pytest

from vantage.tasks.training import progress as progress_module
from vantage.tasks.training.progress import (
    Pace,
    Progress,
    StageProgress,
    read_progress,
)


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


def shown_soon(path: Path, phase: str) -> StageProgress:
    """Return the report once it shows the phase, which another thread writes a moment later."""
    give_up = time.monotonic() + 20
    while (report := shown(path)).phase != phase and time.monotonic() < give_up:
        time.sleep(0.01)
    return report


def test_a_phase_within_a_step_is_shown_with_its_counts_until_the_step_ends(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    progress = Progress(path, total=9, phase="running")
    progress.update(1, metrics={"loss": 0.5})
    progress_module.phase("sampling", 120, 256, note="token 37 of 72")
    report = shown_soon(path, "sampling")
    assert (report.phase_done, report.phase_total, report.phase_note) == (120, 256, "token 37 of 72")
    assert (report.step, report.metrics) == (1, {"loss": 0.5})
    with progress_module.within("validation"):
        progress_module.phase("sampling")
    assert shown_soon(path, "validation: sampling").phase_total == 0
    progress_module.phase("updating", 1, 8)
    assert shown_soon(path, "updating").phase_done == 1
    progress.update(9)
    assert (shown(path).phase, shown(path).phase_total) == ("running", 0)


def test_a_loop_that_tells_of_ten_thousand_phases_writes_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "progress.json"
    progress = Progress(path, total=9, phase="running")
    replace, written = os.replace, []
    monkeypatch.setattr(os, "replace", lambda *paths: (written.append(time.monotonic()), replace(*paths)))
    began = time.monotonic()
    for number in range(10_000):
        progress.phase(f"phase {number}", number, 10_000)
    seconds = time.monotonic() - began
    report = shown_soon(path, "phase 9999")
    assert report.phase_done == 9_999, "the newest is shown in the end"
    assert len(written) <= seconds / 0.2 + 2
    assert seconds < 5.0, "it costs the loop well below a millisecond each"


def test_the_rows_of_a_pass_are_told_and_the_most_of_a_phase_at_once(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    progress = Progress(path, total=9, phase="running")
    assert (shown(path).pass_rows, shown(path).pass_tokens) == (None, None)
    progress.computing(4, 120)
    assert (shown(path).pass_rows, shown(path).pass_tokens) == (4, 120)
    progress.computing(6, 90)  # more rows, fewer positions
    assert shown(path).pass_tokens == 120, "shown a moment later"
    progress.phase("sampling")
    progress.computing(5, 50)
    assert (shown(path).phase, shown(path).pass_tokens) == ("sampling", 50)
    progress.computing(3, 30)
    progress.update(1)
    progress.close()
    assert (shown(path).step, shown(path).pass_rows, shown(path).pass_tokens) == (1, 3, 30)


def test_what_is_over_writes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    loading = Progress(path, total=0, phase="loading")
    loading.phase("sampling")  # to be shown by another thread, a moment later
    Progress(path, total=9, phase="running")
    time.sleep(2 * progress_module.SECONDS_BETWEEN_SHOWS)
    assert shown(path).phase == "running"

    progress_module.phase("updating")
    progress_module.end()
    path.unlink()
    time.sleep(2 * progress_module.SECONDS_BETWEEN_SHOWS)
    progress_module.phase("nobody is told")
    assert not path.exists()


def test_a_full_disk_stops_nobody_who_tells_of_a_phase(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "progress.json"
    path.parent.mkdir()
    progress = Progress(path, total=9, phase="running")
    path.unlink()
    path.parent.rmdir()
    progress.phase("sampling")
    time.sleep(0.5)
    path.parent.mkdir()
    progress.phase("scoring")
    give_up = time.monotonic() + 20
    while not path.exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert shown(path).phase == "scoring"


def test_time_left_is_told_at_the_pace_of_the_newest_steps() -> None:
    """There are 14 iterations of 100 s, of which the first begins at 50 s, after loading."""
    pace = Pace()
    pace.mark(0, 0.0)
    pace.mark(0, 50.0)
    assert pace.seconds_left(0, 14, 60.0) is None, "nothing is known before the first step's end"
    pace.mark(1, 150.0)
    assert pace.seconds_left(1, 14, 150.0) == pytest.approx(1300)
    assert pace.seconds_left(1, 14, 190.0) == pytest.approx(1260)
    assert pace.seconds_left(1, 14, 900.0) == pytest.approx(12 * (100 + 750) / 2), (
        "an iteration that takes long is nearly over, and changes the pace"
    )
    for step in range(2, 14):
        pace.mark(step, 50.0 + 100.0 * step)
    assert pace.seconds_left(13, 14, 1350.0) == pytest.approx(100)
    assert pace.seconds_left(13, 14, 1449.0) == pytest.approx(1)
    assert pace.seconds_left(13, 14, 1451.0) is None, "nothing tells how long the last one still takes"
    pace.mark(14, 1450.0)
    assert pace.seconds_left(14, 14, 1450.0) is None


def test_time_left_follows_a_pace_that_changes() -> None:
    """After a thousand steps of 0.1 s come steps of 1 s. After 100 of these the old pace has no effect."""
    pace, now = Pace(), 0.0
    for step in range(1001):
        pace.mark(step, now)
        now += 0.1
    now = 100.0
    for step in range(1001, 1101):
        now += 1.0
        pace.mark(step, now)
    assert pace.seconds_left(1100, 1200, now) == pytest.approx(100)


def test_an_attempt_that_goes_on_measures_its_own_steps_alone() -> None:
    pace = Pace()
    pace.mark(30, 5.0)  # the checkpoint's step
    pace.mark(30, 8.0)  # the loop begins
    pace.mark(31, 10.0)
    assert pace.seconds_left(31, 40, 10.0) == pytest.approx(18)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_progress_file_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "progress.json").write_bytes(content)
    assert read_progress(tmp_path / "progress.json") is None


def test_a_reader_never_sees_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    path = tmp_path / "progress.json"
    progress = Progress(path, total=9, phase="training")
    replace, seen = os.replace, []

    def look_and_replace(source: Path, target: Path) -> None:
        seen.append(shown(path).step)  # the new file is written, and not yet renamed
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_and_replace)
    for step in (1, 2, 3):
        clock.now += 1
        progress.update(step)
    assert seen == [0, 1, 2]
    assert shown(path).step == 3
