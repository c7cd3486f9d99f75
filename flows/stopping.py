"""Stop requests for a run: by a signal, or by an exception in the flow."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stopping(request_stop: Callable[[], None]) -> Iterator[None]:
    """Inside this block, SIGINT, SIGTERM and any exception call ``request_stop``.

    Called in a coroutine; only the main thread can handle signals.
    """
    loop = asyncio.get_running_loop()
    taken = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in taken}
    for number in taken:
        loop.add_signal_handler(number, request_stop)
    try:
        yield
    except BaseException:
        request_stop()
        raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


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
