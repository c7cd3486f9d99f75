"""Recorded times keep their order and distances when the wall clock is moved."""

from itertools import pairwise
from pathlib import Path

import pytest

from vantage.ledger.outbox import Outbox
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.steady_clock import SteadyClock


class Clocks:
    """A wall clock that somebody moves, and the time since the machine was started."""

    def __init__(self) -> None:
        self.wall, self.passed = 1_000_000_000_000_000_000, 5_000_000_000

    def wait(self, seconds: float, *, moved: float = 0.0) -> None:
        self.passed += int(seconds * 1e9)
        self.wall += int((seconds + moved) * 1e9)

    def clock(self) -> SteadyClock:
        return SteadyClock(wall=lambda: self.wall, passed=lambda: self.passed)


@pytest.mark.parametrize("moved", [-7200.0, 0.0, 7200.0])
def test_a_clock_that_is_moved_changes_no_distance(moved: float) -> None:
    clocks = Clocks()
    clock = clocks.clock()
    start = clock.now()
    assert start == 1_000_000_000_000
    clocks.wait(3.0, moved=moved)
    assert clock.now() - start == 3000


@pytest.mark.parametrize(("moved", "later"), [(-7200.0, 0), (7200.0, 7200_000)])
def test_a_process_that_goes_on_follows_what_is_recorded(moved: float, later: int) -> None:
    """If the clock was set back meanwhile, time continues from the record; if it was set forward, the present wall
    clock is used.
    """
    clocks = Clocks()
    recorded = clocks.clock().now()
    clocks.wait(0.0, moved=moved)
    resumed = clocks.clock()
    resumed.follow(recorded)
    assert resumed.now() == recorded + later
    clocks.wait(2.0)
    assert resumed.now() == recorded + later + 2000


def test_the_outbox_of_a_run_whose_clock_is_set_back_is_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is set back by two hours between the first process and the second."""
    clocks = Clocks()
    monkeypatch.setattr("vantage.ledger.run_ledger.SteadyClock", clocks.clock)
    for _ in range(2):
        with Ledger("http://127.0.0.1:9", tmp_path, "tiny") as ledger:
            ledger.open_run("0001-tiny-aaaaaa", "tiny", {})
            clocks.wait(5.0, moved=-7200.0)
            ledger.finish_run("resumable")
    times = [line["time"] for _, line in Outbox(tmp_path / "runs" / "0001-tiny-aaaaaa" / "ledger").read()]
    assert len(times) == 4
    assert [later - earlier for earlier, later in pairwise(times)] == [5000, 0, 5000]
