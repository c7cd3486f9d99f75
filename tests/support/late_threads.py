"""Delay threads, so that tests which rely on the order of threads fail: ``pytest -p tests.support.late_threads``.

Every thread begins late, and goes on late after it has notified another one. A test must wait for what it needs, and the
product must do what others may wait for before it notifies them.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest

LATE_SECONDS = 0.1


def pytest_configure(config: pytest.Config) -> None:
    """Delay all threads of this process of tests, to its end."""
    delays = ExitStack()
    delays.enter_context(late_threads())
    config.add_cleanup(delays.close)


@contextmanager
def late_threads() -> Iterator[None]:
    """Delay the threads of this process inside the block; the main thread is never late."""
    run, notify, leave = threading.Thread.run, threading.Condition.notify, threading.Condition.__exit__

    def run_late(thread: threading.Thread) -> None:
        _wait()
        run(thread)

    def notify_first(condition: Any, n: int = 1) -> None:
        condition.has_notified = True
        notify(condition, n)

    def leave_late(condition: Any, *error: Any) -> None:
        # who was notified goes on as soon as the lock is free
        has_notified = condition.__dict__.pop("has_notified", False)
        leave(condition, *error)
        if has_notified:
            _wait()

    thread, condition = cast("Any", threading.Thread), cast("Any", threading.Condition)
    thread.run, condition.notify, condition.__exit__ = run_late, notify_first, leave_late
    try:
        yield
    finally:
        thread.run, condition.notify, condition.__exit__ = run, notify, leave


def _wait() -> None:
    # A thread that has just begun notifies the one that started it, and is not listed yet.
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    if thread not in (None, threading.main_thread()):
        time.sleep(LATE_SECONDS)
