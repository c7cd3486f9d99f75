"""A thread passes on what is sampled to its listener: nobody waits for it, and it leaves nothing behind."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from vantage.tasks.rollout import listening_beside
from vantage.tasks.rollout.listening_beside import ListeningBeside

SECONDS = 30.0


class Heard:
    """A listener that notes what it receives, in which thread, and that can be held up."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.threads: set[str] = set()
        self.kept_up = self.given_up = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.error: Exception | None = None

    def sampled(self, rows: Sequence[int], responses: Sequence[list[int]]) -> None:
        self.may_go_on.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.threads.add(threading.current_thread().name)
        assert not self.rows.keys() & set(rows), "each is received once"
        self.rows |= dict(zip(rows, responses, strict=True))

    def keep_up(self) -> None:
        self.kept_up += 1

    def give_up(self) -> None:
        self.given_up += 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_beside, "KEEP_UP_SECONDS", 0.01)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert is_so()


def test_it_receives_all_responses_once_and_keeps_up_after_the_last() -> None:
    heard = Heard()
    beside = ListeningBeside(heard)
    beside.sampled([3, 1], [[30], [10]])
    beside.ended(range(5), [[0], [10], [20], [30], [40]])
    until(lambda: len(heard.rows) == 5)
    before = heard.kept_up
    until(lambda: heard.kept_up > before + 2)
    beside.stop()
    assert heard.rows == {row: [10 * row] for row in range(5)}
    assert heard.threads == {"listening beside"}
    kept_up = heard.kept_up
    time.sleep(0.1)
    assert heard.kept_up == kept_up
    assert heard.given_up == 0


def test_who_samples_never_waits_and_what_was_not_passed_on_is_dropped() -> None:
    heard = Heard()
    heard.may_go_on.clear()
    beside = ListeningBeside(heard)
    for row in range(100):
        beside.sampled([row], [[row]])
    threading.Timer(0.2, heard.may_go_on.set).start()
    beside.stop()
    assert len(heard.rows) <= 1
    assert "listening beside" not in {each.name for each in threading.enumerate()}


def test_an_error_is_raised_where_the_responses_are_taken() -> None:
    heard = Heard()
    heard.error = RuntimeError("deaf")
    beside = ListeningBeside(heard)
    beside.sampled([0], [[1]])
    beside.sampled([1], [[1]])
    until(lambda: not beside._thread.is_alive())
    with pytest.raises(RuntimeError, match="deaf"):
        beside.stop()
    beside.give_up()
    assert heard.given_up == 1
