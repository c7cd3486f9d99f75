"""A clock for records: the wall clock when it was made, plus the seconds that have passed since.

A wall clock that is set back or forward meanwhile changes no record, so nothing ends before it has begun.
"""

import threading
import time
from collections.abc import Callable


def _since_boot() -> int:
    """Return the nanoseconds that have passed since the machine was started, including those in which it slept."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Milliseconds since 1970, which never decrease."""

    def __init__(
        self, *, wall: Callable[[], int] = time.time_ns, passed: Callable[[], int] = _since_boot
    ) -> None:
        """Read both clocks, in nanoseconds: ``wall`` once, ``passed`` each time."""
        self._passed = passed
        self._start = wall() - passed()
        self._lock = threading.Lock()

    def now(self) -> int:
        """Return the time."""
        with self._lock:
            return (self._start + self._passed()) // 1_000_000

    def follow(self, recorded: int) -> None:
        """Go on from a recorded time if that is later, as after a process whose wall clock was ahead."""
        with self._lock:
            self._start = max(self._start, recorded * 1_000_000 - self._passed())
