"""A process counts as hung by rule; that it is then killed, with its stacks in the log, is tested in ``test_launch``."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vantage.attempts.launchers.watchdog import Watchdog, cpu_seconds_of_session, is_stopped_by_a_signal
from vantage.tasks.training.progress import Progress


class Process:
    """A process with a clock of its own, which uses ``load`` CPUs and reports when the test asks it to."""

    def __init__(self, folder: Path, *, load: float, num_ranks: int = 0) -> None:
        self.now, self.cpu, self.load = 1000.0, 0.0, load
        self.file = folder / "progress.json"
        self.num_ranks = num_ranks
        self.is_stopped = False
        self.stopped_ranks: set[int] = set()

    def watched(self, *, hang_seconds: float | None) -> Watchdog:
        return Watchdog(
            self.file,
            hang_seconds=hang_seconds,
            idle_seconds=900.0,
            clock=lambda: self.now,
            cpu_seconds=lambda pid: self.cpu,
            is_stopped=lambda pid: self.is_stopped if pid == 1 else pid - 10 in self.stopped_ranks,
            ranks=lambda: {rank: 10 + rank for rank in range(self.num_ranks)},
        )

    def report(self) -> None:
        Progress(self.file, total=10, phase="running")

    def first_hang_reason(self, watchdog: Watchdog, *, within: float) -> tuple[float, str] | None:
        """Return (seconds from now, the reported reason); None where nothing is reported."""
        begun = self.now
        while self.now < begun + within:
            self.now += 1.0
            self.cpu += self.load
            if hang_reason := watchdog.hang_reason(1):
                return self.now - begun, hang_reason
        return None


def test_one_that_works_may_be_silent_for_as_long_as_the_recipe_says(tmp_path: Path) -> None:
    """A rollout or a compilation of hours is no hang."""
    busy = Process(tmp_path, load=1.0)
    watchdog = busy.watched(hang_seconds=21600.0)
    seconds, hang_reason = busy.first_hang_reason(watchdog, within=30_000.0) or (0.0, "")
    assert seconds == pytest.approx(21600.0, abs=6.0)
    assert hang_reason == "no progress for 6 h"


@pytest.mark.parametrize("load", [0.0, 0.005])
def test_one_that_neither_reports_nor_works_is_given_up_sooner(tmp_path: Path, load: float) -> None:
    """Threads that only wake up to look around are no work."""
    idle = Process(tmp_path, load=load)
    watchdog = idle.watched(hang_seconds=21600.0)
    seconds, hang_reason = idle.first_hang_reason(watchdog, within=30_000.0) or (0.0, "")
    assert seconds == pytest.approx(900.0, abs=15.0)
    assert hang_reason == "neither progress nor work for 15 min"


def test_one_that_falls_idle_is_given_its_time_from_then_on(tmp_path: Path) -> None:
    process = Process(tmp_path, load=2.0)
    watchdog = process.watched(hang_seconds=21600.0)
    assert process.first_hang_reason(watchdog, within=10_000.0) is None
    process.load = 0.0
    seconds, _ = process.first_hang_reason(watchdog, within=2_000.0) or (0.0, "")
    assert seconds == pytest.approx(900.0, abs=15.0)


def test_every_report_begins_the_count_anew_however_little_it_works(tmp_path: Path) -> None:
    """A stage may wait for others, as long as it says so."""
    process = Process(tmp_path, load=0.0)
    watchdog = process.watched(hang_seconds=600.0)
    for _ in range(5):
        assert process.first_hang_reason(watchdog, within=500.0) is None
        process.report()
    assert process.first_hang_reason(watchdog, within=500.0) is None
    assert process.first_hang_reason(watchdog, within=200.0) is not None


def test_the_report_of_an_earlier_attempt_is_no_sign_of_life(tmp_path: Path) -> None:
    process = Process(tmp_path, load=0.0)
    process.report()
    watchdog = process.watched(hang_seconds=60.0)
    seconds, _ = process.first_hang_reason(watchdog, within=100.0) or (0.0, "")
    assert seconds == pytest.approx(60.0, abs=7.0)


def test_time_in_which_nobody_could_look_is_not_counted(tmp_path: Path) -> None:
    """The machine was paused, and everything on it."""
    process = Process(tmp_path, load=0.5)
    watchdog = process.watched(hang_seconds=21600.0)
    assert process.first_hang_reason(watchdog, within=100.0) is None
    process.now += 100_000.0
    assert process.first_hang_reason(watchdog, within=20_000.0) is None


def test_a_recipe_that_asks_for_it_is_never_interrupted(tmp_path: Path) -> None:
    process = Process(tmp_path, load=0.0)
    assert process.first_hang_reason(process.watched(hang_seconds=None), within=100_000.0) is None


SPIN = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\n"
WAIT = "import sys\nprint('done', flush=True)\nsys.stdin.read()\n"


@pytest.mark.parametrize(
    "program",
    [
        SPIN + WAIT,
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}])\n" + WAIT,
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {SPIN + WAIT!r}])\nchild.wait()\n",
    ],
    ids=["its own", "of a program that has ended", "of a program that runs"],
)
def test_the_work_of_a_process_is_that_of_all_its_programs(program: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert cpu_seconds_of_session(process.pid) >= 0.6
    finally:
        process.communicate()
    assert cpu_seconds_of_session(process.pid) == 0.0


def test_one_that_a_signal_has_stopped_is_given_up_after_a_minute(tmp_path: Path) -> None:
    stopped = Process(tmp_path, load=0.0)
    watchdog = stopped.watched(hang_seconds=21600.0)
    stopped.is_stopped = True
    seconds, hang_reason = stopped.first_hang_reason(watchdog, within=300.0) or (0.0, "")
    assert seconds == pytest.approx(60.0, abs=6.0)
    assert hang_reason == "a signal has stopped its process (SIGSTOP), and nobody continued it for 1 min"


def test_one_that_is_continued_in_time_goes_on(tmp_path: Path) -> None:
    """A stage that is stopped for half a minute, twice, continues."""
    looked_at = Process(tmp_path, load=1.0)
    watchdog = looked_at.watched(hang_seconds=21600.0)
    for _ in range(2):
        looked_at.is_stopped = True
        assert looked_at.first_hang_reason(watchdog, within=40.0) is None
        looked_at.is_stopped = False
        assert looked_at.first_hang_reason(watchdog, within=20.0) is None


def test_one_rank_that_a_signal_has_stopped_is_named_after_a_minute(tmp_path: Path) -> None:
    """The process that starts the ranks runs on, and so do the others."""
    ranked = Process(tmp_path, load=0.0, num_ranks=3)
    watchdog = ranked.watched(hang_seconds=21600.0)
    ranked.stopped_ranks = {1}
    seconds, hang_reason = ranked.first_hang_reason(watchdog, within=300.0) or (0.0, "")
    assert seconds == pytest.approx(60.0, abs=6.0)
    assert hang_reason == "a signal has stopped its rank 1 (SIGSTOP), and nobody continued it for 1 min"


def test_the_minute_is_one_ranks_own(tmp_path: Path) -> None:
    """Ranks that are stopped for 40 s each, one after the other, do not count as hanging."""
    ranked = Process(tmp_path, load=1.0, num_ranks=3)
    watchdog = ranked.watched(hang_seconds=21600.0)
    for rank in (0, 1, 2):
        ranked.stopped_ranks = {rank}
        assert ranked.first_hang_reason(watchdog, within=40.0) is None


def test_a_stage_that_hangs_sooner_than_in_a_minute_names_the_stopped_rank(tmp_path: Path) -> None:
    """The stage's last report is older than the stop."""
    ranked = Process(tmp_path, load=0.0, num_ranks=2)
    watchdog = ranked.watched(hang_seconds=30.0)
    assert ranked.first_hang_reason(watchdog, within=12.0) is None
    ranked.stopped_ranks = {0}
    seconds, hang_reason = ranked.first_hang_reason(watchdog, within=300.0) or (0.0, "")
    assert seconds == pytest.approx(18.0, abs=4.0)
    assert hang_reason == "no progress for 30 s, and a signal has stopped its rank 0 (SIGSTOP)"


def test_the_kernel_is_asked_whether_a_process_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # it waits for its input now, and not for a disk
        assert not is_stopped_by_a_signal(process.pid), "it sleeps"
        process.send_signal(signal.SIGSTOP)
        while not is_stopped_by_a_signal(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_stopped_by_a_signal(process.pid)
        process.kill()
    assert not is_stopped_by_a_signal(process.pid), "it has ended"


def test_a_stopped_rank_of_a_stage_with_a_short_limit_is_given_up_within_it(tmp_path: Path) -> None:
    """The others go on reporting."""
    ranked = Process(tmp_path, load=1.0, num_ranks=2)
    watchdog = ranked.watched(hang_seconds=30.0)
    ranked.stopped_ranks = {1}
    for _ in range(2):
        assert ranked.first_hang_reason(watchdog, within=12.0) is None
        ranked.report()
    seconds, hang_reason = ranked.first_hang_reason(watchdog, within=20.0) or (0.0, "")
    assert seconds == pytest.approx(6.0, abs=4.0)
    assert hang_reason == "a signal has stopped its rank 1 (SIGSTOP), and nobody continued it for 30 s"
