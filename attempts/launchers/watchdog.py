"""Detect a hanging stage process, by the time since its last progress report.

The recipe sets the limit (``resources.hang_seconds``), since a rollout of a large model takes hours. A process that
leaves its CPUs idle has a shorter limit: sampling, training, compiling and waiting for an accelerator keep a CPU busy,
a deadlock and a dead file system do not. Only monotonic time and the kernel's counters are used.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

IDLE_SECONDS = 900.0
"""Limit of seconds without reports and CPU use, if ``hang_seconds`` is longer."""

STOPPED_SECONDS = 60.0
"""Limit of seconds for a process that a signal has stopped (SIGSTOP)."""

IDLE_SHARE = 0.01
"""Share of one CPU below which a process counts as idle; polling threads use less."""

POLL_SECONDS = 5.0

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Watchdog:
    """Watches one process from its start; to be polled a few times a second."""

    def __init__(
        self,
        progress: Path,
        *,
        hang_seconds: float | None,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[int], float] | None = None,
        is_stopped: Callable[[int], bool] | None = None,
        ranks: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """Start watching.

        Args:
            progress: the file that is replaced whenever the stage reports.
            hang_seconds: limit without a report; None: no limit.
            idle_seconds: limit without a report and without CPU use.
            clock: monotonic seconds.
            cpu_seconds: process id → CPU time of its session; None: from the kernel.
            is_stopped: process id → whether a signal has stopped it; None: from the kernel.
            ranks: number of each rank that is a process of its own → its process id.
        """
        self._progress = progress
        self._hang_seconds = hang_seconds
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._cpu_seconds = cpu_seconds or cpu_seconds_of_session
        self._is_stopped = is_stopped or is_stopped_by_a_signal
        self._ranks = ranks
        self._report = self._newest_report()
        self._cpu = 0.0
        self._last_poll = clock()
        self._silent = self._idle = 0.0
        self._stopped: dict[str, float] = {}

    def hang_reason(self, pid: int) -> str | None:
        """Return the reason why the process counts as hung; None: it does not."""
        if self._hang_seconds is None:
            return None
        interval = min(POLL_SECONDS, self._hang_seconds / 10)
        passed = self._clock() - self._last_poll
        if passed < interval:
            return None
        self._last_poll += passed
        # After a long pause of this process, for example of the whole machine, the stage may have been paused too.
        passed = min(passed, 3 * interval)
        self._silent += passed
        self._idle += passed
        processes = {"its process": pid} | {f"its rank {rank}": each for rank, each in self._ranks().items()}
        self._stopped = {
            name: self._stopped.get(name, 0.0) + passed
            for name, each in processes.items()
            if self._is_stopped(each)
        }
        report, cpu = self._newest_report(), self._cpu_seconds(pid)
        if report != self._report:
            self._report, self._silent, self._idle = report, 0.0, 0.0
        if cpu - self._cpu > 1.0 + IDLE_SHARE * self._idle:
            self._cpu, self._idle = cpu, 0.0
        longest_stop = min(STOPPED_SECONDS, self._hang_seconds)
        given_up = [name for name, seconds in self._stopped.items() if seconds >= longest_stop]
        if given_up:
            return (
                f"a signal has stopped {' and '.join(given_up)} (SIGSTOP), and nobody continued it for "
                f"{_duration(longest_stop)}"
            )
        if self._silent >= self._hang_seconds:
            return f"no progress for {_duration(self._hang_seconds)}{self._stopped_now()}"
        if self._idle >= self._idle_seconds:
            return f"neither progress nor work for {_duration(self._idle_seconds)}{self._stopped_now()}"
        return None

    def _stopped_now(self) -> str:
        return f", and a signal has stopped {' and '.join(self._stopped)} (SIGSTOP)" if self._stopped else ""

    def _newest_report(self) -> tuple[int, int] | None:
        """Return the identity of the newest report; the file is replaced, never edited in place."""
        try:
            found = self._progress.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def is_stopped_by_a_signal(pid: int) -> bool:
    """Return whether the process is stopped (state ``T`` of proc(5)); a process that has ended is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] == b"T"


def cpu_seconds_of_session(leader: int) -> float:
    """Return the CPU time of all processes of a session, including children that have ended."""
    ticks = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # the process has just ended
            continue
        # proc(5) counts from 1; the first two fields are before the parenthesis: session is 6, utime to cstime 14-17
        if int(fields[3]) == leader:
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_SECOND


def _duration(seconds: float) -> str:
    """Return a duration in the largest unit in which it is a whole number."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
