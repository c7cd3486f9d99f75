"""A file that a worker touches whenever it asks its pool for work, by which a container's probe finds a hung worker.

``python -m vantage.flows.pools.alive`` ends with exit code 0 if the worker has asked within the last ten minutes, else with 1.
A worker does not count as hung if the Prefect server does not answer, since it goes on asking.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

ALIVE_FILE = "VANTAGE_ALIVE_FILE"
"""Name of the variable with the path of the file; unset: there is none. Each worker of a machine needs its own file."""
LIMIT_SECONDS = 600
"""Seconds without a request after which a worker counts as hung. Prefect's client repeats a request for minutes, after longer
and longer pauses."""


def mark_alive() -> None:
    """Record that the worker asks now. Setting the file's time needs no room, so a full disk does not stop the
    worker."""
    if (path := os.environ.get(ALIVE_FILE)) is None:
        return
    now = time.monotonic_ns()  # the same clock for all processes of a machine, and it is never set
    with suppress(OSError):
        if not os.path.exists(path):
            Path(path).touch(mode=0o600)
        os.utime(path, ns=(now, now))


def silent_seconds(path: Path) -> float | None:
    """Return the seconds since the worker asked; None if it has not asked since the machine started."""
    try:
        asked = path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    seconds = (time.monotonic_ns() - asked) / 1e9
    return seconds if seconds >= 0 else None


def main() -> int:
    """Return the exit code of the probe, and print what is wrong."""
    named = os.environ.get(ALIVE_FILE)
    if named is None:
        print(f"{ALIVE_FILE} is not set; the worker and this probe need the same path", file=sys.stderr)
        return 1
    seconds = silent_seconds(Path(named))
    if seconds is None:
        print(f"the worker has not asked its pool for work yet ({named})", file=sys.stderr)
        return 1
    if seconds > LIMIT_SECONDS:
        print(f"the worker has not asked its pool for work for {seconds:,.0f} s ({named})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
