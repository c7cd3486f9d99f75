"""Whether a stage's process hangs: it reports no progress for too long.

How long a step may take is the recipe's to say (``resources.hang_seconds``), since a rollout of a large model takes
hours. A process that meanwhile leaves its processors idle is given up sooner: whoever samples, trains, compiles or
waits for an accelerator keeps one busy, while a deadlock and a dead file system do not. Only monotonic time and the
kernel's own counts are compared.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

IDLE_SECONDS = 900.0
"""How long a process may neither report nor compute, where it may be silent for longer than that."""

IDLE_SHARE = 0.01
"""Of one CPU: what threads that only look whether there is something to do use at most."""

SECONDS_BETWEEN_LOOKS = 5.0

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Watchdog:
    """Watches one process from its start; to be asked a few times a second."""

    def __init__(
        self,
        progress: Path,
        *,
        hang_seconds: float | None,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[int], float] | None = None,
    ) -> None:
        """Begin to watch.

        Args:
            progress: the file that is replaced whenever the stage reports.
            hang_seconds: without a report, whatever the process does; None: for ever.
            idle_seconds: without a report and without work.
            clock: seconds that never jump.
            cpu_seconds: process id → CPU time that it and its programs have used; None: ask the kernel.
        """
        self._progress = progress
        self._hang_seconds = hang_seconds
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._cpu_seconds = cpu_seconds or cpu_seconds_of_session
        self._report = self._newest_report()
        self._cpu = 0.0
        self._looked_at = clock()
        self._silent = self._idle = 0.0

    def complaint(self, pid: int) -> str | None:
        """Why the process is taken for hung; None while it is not."""
        if self._hang_seconds is None:
            return None
        between_looks = min(SECONDS_BETWEEN_LOOKS, self._hang_seconds / 10)
        passed = self._clock() - self._looked_at
        if passed < between_looks:
            return None
        self._looked_at += passed
        # While nobody could look, the process may have stood still with us: in a machine that was paused, for example.
        passed = min(passed, 3 * between_looks)
        self._silent += passed
        self._idle += passed
        report, cpu = self._newest_report(), self._cpu_seconds(pid)
        if report != self._report:
            self._report, self._silent, self._idle = report, 0.0, 0.0
        if cpu - self._cpu > 1.0 + IDLE_SHARE * self._idle:
            self._cpu, self._idle = cpu, 0.0
        if self._silent >= self._hang_seconds:
            return f"no progress for {_told(self._hang_seconds)}"
        if self._idle >= self._idle_seconds:
            return f"neither progress nor work for {_told(self._idle_seconds)}"
        return None

    def _newest_report(self) -> tuple[int, int] | None:
        """What tells one report from another; the file is never edited in place."""
        try:
            found = self._progress.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def cpu_seconds_of_session(leader: int) -> float:
    """CPU time that all processes of a session, and those of theirs that have ended, have used so far."""
    ticks = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has just ended
            continue
        # proc(5) counts from 1, and the first two fields stand before the parenthesis: session is 6, utime to cstime 14-17
        if int(fields[3]) == leader:
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_SECOND


def _told(seconds: float) -> str:
    """A length of time in the largest unit of which it is a whole number."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
