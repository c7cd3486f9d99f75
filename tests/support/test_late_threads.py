"""A thread begins late, and goes on late after it has notified another one."""

import threading
from typing import Any

import pytest

from tests.support import late_threads


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the threads that are late, in place of waiting."""
    found: list[str] = []

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            found.append(threading.current_thread().name)

    monkeypatch.setattr(late_threads, "time", Clock)
    return found


def in_thread(work: Any) -> None:
    thread = threading.Thread(target=work, name="other")
    thread.start()
    thread.join()


def test_a_thread_begins_late(waits: list[str]) -> None:
    with late_threads.late_threads():
        in_thread(lambda: waits.append("began"))
    in_thread(lambda: waits.append("in time"))
    assert waits == ["other", "began", "in time"]


def test_a_thread_that_notifies_goes_on_late(waits: list[str]) -> None:
    event, condition = threading.Event(), threading.Condition()

    def work() -> None:
        waits.append("began")
        event.set()
        with condition:
            condition.notify_all()
            waits.append("holds the lock")
        with condition:
            waits.append("notifies nobody")
        waits.append("went on")

    with late_threads.late_threads():
        in_thread(work)
    assert waits == ["other", "began", "other", "holds the lock", "other", "notifies nobody", "went on"]


def test_the_main_thread_is_never_late(waits: list[str]) -> None:
    with late_threads.late_threads():
        threading.Event().set()
    assert waits == []
