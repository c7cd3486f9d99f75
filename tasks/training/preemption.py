"""Requests to stop, which a stage notices between two steps and answers by saving its state.

A preempted stage writes a checkpoint and raises ``Preempted``; its process then ends with the exit code that means
"resume me". A stage that does not check for requests is killed after its grace period, and goes on from the checkpoint
before. Sampling may take longer than the grace period, and changes nothing that has to be saved, so there the request
is noticed at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_signals_received = 0
_at_once = False
_is_inside = False
"""Whether this process is inside ``at_once``."""
_limit: str | None = None
"""The time limit that has passed, in words."""


class Preempted(Exception):
    """The stage was asked to stop, saved its state and can be resumed from there."""


class TimeIsUp(Preempted):
    """The stage has used the time that its recipe allows; it saved its state and can be resumed from there."""


class Requested(BaseException):
    """The request itself, raised when it arrives. It is not an Exception, so that no error handler catches it."""


def requested() -> bool:
    """Return whether this process has been asked to stop; cheap enough to ask after every micro-step."""
    return _signals_received > 0


def listen() -> None:
    """Take SIGTERM as the request from now on; only a process's main thread may call this.

    Raises:
        ValueError: called from another thread.
    """
    signal.signal(signal.SIGTERM, _remember)


def request() -> None:
    """Ask this process to stop, from any of its threads; ``at_once`` does not notice it."""
    global _signals_received
    _signals_received += 1


def preempted(after: str) -> Preempted:
    """Return the error of a stage that has saved its state after ``after``, for the reason of the request."""
    if _limit is not None:
        return TimeIsUp(f"{_limit} has passed; stopped after {after}")
    return Preempted(f"stopped on request after {after}")


@contextmanager
def within_time(seconds: float | None, limit: str) -> Iterator[None]:
    """Ask this process to stop when the block has taken this many seconds; None: never.

    Args:
        limit: the limit in words, for the message.
    """
    global _limit
    if seconds is None:
        yield
        return

    def pass_limit() -> None:
        global _limit
        _limit = limit
        request()
        if signal.getsignal(signal.SIGTERM) is _remember:  # so that sampling notices it at once
            signal.pthread_kill(main, signal.SIGTERM)

    main = threading.main_thread().ident or 0
    timer = threading.Timer(seconds, pass_limit)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _limit = None


@contextmanager
def at_once() -> Iterator[None]:
    """Raise ``Requested`` inside the block when a request arrives; an earlier request raises it at the beginning."""
    global _at_once, _is_inside
    try:
        _at_once = _is_inside = True
        if _signals_received:
            raise Requested
        yield
    finally:
        _at_once = _is_inside = False


def heed() -> None:
    """Raise ``Requested`` inside ``at_once`` again if the first one was lost: asyncio only logs errors of its
    callbacks."""
    if _is_inside and _signals_received:
        raise Requested


def _remember(_signal: int, _frame: FrameType | None) -> None:
    global _signals_received, _at_once
    _signals_received += 1
    if _at_once:
        _at_once = False  # raise only once: during a second signal the state is being saved
        raise Requested
