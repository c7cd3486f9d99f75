"""Find and kill all descendants of a process, at any depth and in any session.

A process that leaves its group and session becomes a child of init when its parent ends, and can no longer be found,
unless an ancestor is the subreaper of its descendants. Stages and the fork server are.
"""

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
"""Value of the constant in ``linux/prctl.h``."""

_MAX_SCANS = 1000
"""Most scans; each kills all descendants that it finds, so only processes that fork faster survive."""


def adopt_descendants() -> None:
    """Make descendants that lose their parent children of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_descendants(ancestor: int, *, keep: Collection[int] = ()) -> None:
    """Kill every descendant of a process, except its children ``keep`` and their descendants.

    Scans again until there are none, since processes may fork meanwhile.
    """
    for _ in range(_MAX_SCANS):
        living = _living_descendants(ancestor, keep)
        if not living:
            return
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _living_descendants(ancestor: int, keep: Collection[int]) -> list[int]:
    """Return the living descendants, including those of zombies."""
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:  # the process has just ended
            continue
        children.setdefault(int(parent), []).append(int(entry.name))
        if state in (b"Z", b"X"):
            ended.add(int(entry.name))
    found, waiting = [], [pid for pid in children.get(ancestor, []) if pid not in keep]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return [pid for pid in found if pid not in ended]
