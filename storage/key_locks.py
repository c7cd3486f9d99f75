"""Hold the lock of a stage key, and show its holder to those who wait."""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vantage.storage.durable_files import open_lock, try_lock

_SECONDS_BETWEEN_TRIES = 0.1


class Locked(TimeoutError):
    """Another process holds the stage key."""


@contextmanager
def hold_lock(
    path: Path,
    subject: str,
    *,
    holder: str,
    on_wait: Callable[[str], None] | None = None,
    timeout: float | None = None,
) -> Iterator[None]:
    """Hold a lock file among threads and processes; its content names the holder.

    The kernel releases the lock when the process ends.

    Args:
        path: the lock file.
        subject: name of the locked thing, for the message.
        holder: name of the caller, shown to those who wait.
        on_wait: called with the current holder at the start of the wait, and whenever the holder changes.
        timeout: seconds to wait; None: no limit.

    Raises:
        Locked: the timeout has passed.
    """
    descriptor = open_lock(path)
    deadline = None if timeout is None else time.monotonic() + timeout
    reported = None
    try:
        while not try_lock(descriptor):
            present = (
                os.pread(descriptor, 4096, 0).decode(errors="replace") or "a holder that is just starting"
            )
            if on_wait is not None and present != reported:
                reported = present
                on_wait(present)
            if deadline is not None and time.monotonic() >= deadline:
                raise Locked(
                    f"{subject} has been held by {present} for more than {timeout:g} s; wait for it, or stop it"
                )
            time.sleep(_SECONDS_BETWEEN_TRIES)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{holder} (process {os.getpid()} on {socket.gethostname()})".encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def holder_of_lock(path: Path) -> str | None:
    """Return the holder of a lock file, or None; nothing is written, and the lock is tried for a moment."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 4096, 0).decode(errors="replace") or "a run that is just starting"
    finally:
        os.close(descriptor)
    return None
