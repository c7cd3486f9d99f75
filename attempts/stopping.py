"""Handle stop requests for a run or an attempt: a signal, the end of a worker, or an exception in the flow.

A terminal that disappears (a dropped connection, a closed window) sends SIGHUP, which has the same effect as SIGTERM.
"""

import asyncio
import errno
import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DRAIN_FILE = "VANTAGE_DRAIN_FILE"
"""Name of the variable with a file's path. A worker makes the file to ask the processes that it started to save and
stop."""


class Stop(threading.Event):
    """An event; when it is set, the computations of a run save their state and stop."""

    leaves_pools = False
    """Whether attempts on pools go on, for the next process that executes the run."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that request a stop: SIGHUP only where it was not ignored at the start, as under ``nohup``."""
    hung_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hung_up)


def remember_hangup() -> None:
    """Ignore later SIGHUPs, and drop output if its terminal is gone.

    A shell and the kernel send one each; neither the second nor a write error may end a process that saves its state.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


@contextmanager
def stopping(
    request_stop: Callable[[], None], *, drained: Callable[[], None] | None = None
) -> Iterator[None]:
    """Call ``request_stop`` inside this block on SIGINT, SIGTERM, SIGHUP, the worker's request and any exception.

    It is used in a coroutine; only the main thread can handle signals. After a SIGHUP, further ones are ignored for
    good.

    Args:
        request_stop: called in any thread.
        drained: called instead of ``request_stop`` for the worker's request.
    """
    loop = asyncio.get_running_loop()
    done = threading.Event()
    if drain := os.environ.get(DRAIN_FILE):
        watch = threading.Thread(
            target=_watch, args=(Path(drain), done, drained or request_stop), daemon=True
        )
        watch.start()
    taken = stop_signals() if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in taken}

    # not by the loop, whose handler could be changed only through the default, which ends the process
    on_hangup = before.pop(signal.SIGHUP, None)

    def hung_up(_: int, __: object) -> None:
        nonlocal on_hangup
        on_hangup = None
        remember_hangup()
        loop.call_soon_threadsafe(request_stop)

    if on_hangup is not None:
        signal.signal(signal.SIGHUP, hung_up)
    for number in before:
        loop.add_signal_handler(number, request_stop)
    try:
        yield
    except BaseException:
        request_stop()
        raise
    finally:
        done.set()
        if on_hangup is not None:
            signal.signal(signal.SIGHUP, on_hangup)
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _watch(file: Path, done: threading.Event, request_stop: Callable[[], None]) -> None:
    while not done.wait(1.0):
        if file.exists():
            request_stop()
            return


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first of several errors of a task group, since its message has the cause."""
    try:
        yield
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from group
