"""A request to stop that a stage notices between two steps, and answers by saving what it has.

A preempted stage writes a checkpoint and raises ``Preempted``; its process then ends with the exit code that
means "resume me". A stage that never asks is killed when its time of grace is over and goes on from the
checkpoint before.
"""

import signal
from types import FrameType

_signals_received = 0


class Preempted(Exception):
    """The stage was asked to stop, saved its state and can be resumed from there."""


def requested() -> bool:
    """Whether this process has been asked to stop; cheap enough to ask after every micro-step."""
    return _signals_received > 0


def listen() -> None:
    """Take SIGTERM as the request from now on; only a process's main thread may call this.

    Raises:
        ValueError: called from another thread.
    """
    signal.signal(signal.SIGTERM, _remember)


def _remember(_signal: int, _frame: FrameType | None) -> None:
    global _signals_received
    _signals_received += 1
