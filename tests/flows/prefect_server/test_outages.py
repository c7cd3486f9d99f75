"""A server that does not answer is reported once a minute, and the loops of a worker outlast the outage."""

import asyncio
import logging
import time
from typing import Any

import pytest
from httpx import ConnectError, HTTPStatusError, Request, Response

from vantage.flows.prefect_server import outages
from vantage.flows.prefect_server.outages import Outage, outages_of, prefect_outage, services_outlast


class Clock:
    """Seconds of a day in UTC, which pass when a test changes them."""

    def __init__(self) -> None:
        self.now = 8 * 3600.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(outages.time, "time", found.time)
    monkeypatch.setattr(outages, "monotonic", found.time)
    monkeypatch.setattr(outages.time, "localtime", time.gmtime)
    return found


def answer(code: int) -> HTTPStatusError:
    request = Request("GET", "http://server/api")
    return HTTPStatusError(f"{code}", request=request, response=Response(code, request=request))


def test_an_outage_is_one_line_a_minute_and_one_at_its_end(clock: Clock) -> None:
    lines: list[str] = []
    outage = Outage(lambda: "the server", lines.append)
    outage.is_over()
    for _ in range(150):  # two and a half minutes
        outage.noticed(ConnectError("All connection attempts failed\nand more"))
        clock.now += 1.0
    outage.is_over()
    outage.is_over()
    silent = "the server has not answered since 08:00:00 (All connection attempts failed); it is asked again"
    assert lines == [silent] * 3 + ["the server answers again; it had not answered since 08:00:00"]


def test_a_server_that_answers_every_other_second_fills_no_log(clock: Clock) -> None:
    lines: list[str] = []
    outage = Outage(lambda: "the server", lines.append)
    for _ in range(60):
        outage.noticed(answer(503))
        outage.is_over()
        clock.now += 1.0
    assert len(lines) == 2


def test_the_servers_are_named_without_their_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@prefect:4200/api")
    lines: list[str] = []
    both = outages_of("s3://bucket/workspace", lines.append)
    both.prefect.noticed(ConnectError(""))
    both.storage.noticed(ConnectError("no route"))
    assert [line.partition(" has not")[0] for line in lines] == [
        "the Prefect server at http://prefect:4200/api",
        "the storage s3://bucket/workspace",
    ]
    assert "(ConnectError)" in lines[0]


def test_an_answer_is_named_by_its_status_and_an_outage_is_remembered(clock: Clock) -> None:
    lines: list[str] = []
    outage = Outage(lambda: "the server", lines.append)
    assert not outage.was_noticed
    outage.noticed(answer(503))
    outage.is_over()
    assert outage.was_noticed
    assert "(503 Service Unavailable);" in lines[0]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the loop of Prefect's worker after ``services_outlast``, and the lines that it prints."""
    import prefect._internal.observers
    import prefect.workers.base

    for module in (prefect.workers.base, prefect._internal.observers):
        monkeypatch.setattr(module, "critical_service_loop", vars(module)["critical_service_loop"])
    monkeypatch.setattr(logging, "raiseExceptions", True)
    services_outlast(prefect_outage(print))
    assert not logging.raiseExceptions
    assert (
        vars(prefect._internal.observers)["critical_service_loop"]
        is vars(prefect.workers.base)["critical_service_loop"]
    )
    return vars(prefect.workers.base)["critical_service_loop"]


def test_the_loops_of_a_worker_outlast_an_outage_and_print_no_traceback(
    loop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [ConnectError("refused"), answer(500), answer(503)] * 20
    calls = 0

    class Enough(Exception):
        pass

    async def workload() -> None:
        nonlocal calls
        calls += 1
        if calls <= len(failures):
            raise failures[calls - 1]
        if calls > len(failures) + 1:
            raise Enough

    with pytest.raises(Enough):
        asyncio.run(loop(workload=workload, interval=0.0, jitter_range=0.3, backoff=4))
    assert calls == 62
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert "has not answered since" in printed[0]
    assert "answers again" in printed[1]


def test_an_answer_that_will_not_change_ends_a_loop(loop: Any) -> None:
    async def workload() -> None:
        raise answer(404)

    with pytest.raises(HTTPStatusError):
        asyncio.run(loop(workload=workload, interval=0.0))


def test_a_loop_may_be_run_once(loop: Any) -> None:
    calls: list[int] = []

    async def workload() -> None:
        calls.append(1)

    asyncio.run(loop(workload=workload, interval=60.0, run_once=True))
    assert calls == [1]
