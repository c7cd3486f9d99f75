"""All that a process has started, at any depth, in whatever session, is found and ended.

A process that leaves its group and its session, and whose parent then ends, belongs to init, where nobody finds it:
unless an ancestor has made itself the subreaper of its descendants. Stages and the fork server do.
"""

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
"""From ``linux/prctl.h``."""

_ROUNDS = 1000
"""Looks for more; each ends all that it finds, so only what forks faster than it is found survives."""


def adopt_descendants() -> None:
    """From now on a descendant that loses its parent becomes a child of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_descendants(ancestor: int, *, spare: Collection[int] = ()) -> None:
    """Kill every descendant of a process; its children ``spare`` and theirs are left alone.

    What forks while it is killed is found by looking again, until nothing is left.
    """
    for _ in range(_ROUNDS):
        living = _living_descendants(ancestor, spare)
        if not living:
            return
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _living_descendants(ancestor: int, spare: Collection[int]) -> list[int]:
    """Zombies are passed through, but not among them: they have ended."""
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        children.setdefault(int(parent), []).append(int(entry.name))
        if state in (b"Z", b"X"):
            ended.add(int(entry.name))
    found, waiting = [], [pid for pid in children.get(ancestor, []) if pid not in spare]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return [pid for pid in found if pid not in ended]
