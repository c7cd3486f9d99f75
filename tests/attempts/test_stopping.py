"""Signals, ending workers and people ask a run to stop; its attempts on pools are stopped or left running by rule."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.orchestrated import attempt, attempt_all, orchestrated
from vantage.attempts.stopping import DRAIN_FILE, Stop, first_error, stopping
from vantage.flows.execution import exit_code
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.pools.run_on_pool import CANCELLED_IN_PREFECT, _Attempt
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import AttemptOutcome

pytestmark = pytest.mark.usefixtures("unsent")

ON_POOL = "stages.sft.resources.pool=gpu"


@pytest.mark.parametrize("handled_apart", [True, False])
def test_a_worker_that_ends_is_no_stop_where_that_is_handled_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handled_apart: bool
) -> None:
    monkeypatch.setenv(DRAIN_FILE, str(tmp_path / "drain"))
    (tmp_path / "drain").touch()
    called: list[str] = []

    async def wait() -> None:
        drained = (lambda: called.append("drained")) if handled_apart else None
        with stopping(lambda: called.append("stop"), drained=drained):
            while not called:
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(wait(), 20))
    assert called == ["drained" if handled_apart else "stop"]


def test_only_an_ending_worker_leaves_attempts_on_pools(workspace: Workspace, recipe_file: Path) -> None:
    def stop_of(*asked: str) -> Stop:
        with orchestrated(workspace, recipe_file) as orchestrator:
            for each in asked:
                getattr(orchestrator, each)()
            return orchestrator.stop

    assert stop_of("drain").is_set()
    assert stop_of("drain").leaves_pools
    for asked in (["request_stop"], ["cancel"], ["request_stop", "drain"], ["drain", "cancel"]):
        assert not stop_of(*asked).leaves_pools, asked


def test_an_attempt_that_is_left_on_its_pool_is_not_asked_to_stop() -> None:
    messages = Mock(read=Mock(return_value=None))
    stop = Stop()
    stop.leaves_pools = True
    stop.set()
    parts: dict[str, Any] = dict.fromkeys(
        ("client", "flow_run", "request", "asked", "pool", "storage", "observer", "outages"), Mock()
    )
    assert _Attempt(**parts, messages=messages, stop=stop).wait().status == "stopped"
    messages.write.assert_not_called()
    messages.create.assert_not_called()


def test_a_stage_that_is_left_on_its_pool_is_resumable(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object, **__: object) -> AttemptOutcome:
        return AttemptOutcome(status="stopped")

    monkeypatch.setattr("vantage.flows.pools.run_on_pool.run_on_pool", leave)
    with orchestrated(workspace, recipe_file, ON_POOL) as orchestrator:
        assert isinstance(orchestrator, Orchestrator)
        attempt_all(orchestrator, until="sft")
        orchestrator.drain()
        stage = attempt(orchestrator, "sft")
    assert (stage.status, stage.reason) == ("resumable", "it goes on without this process")


def test_a_stage_that_was_cancelled_in_prefect_is_not_tried_again(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = AttemptOutcome(status="failed", failure=CANCELLED_IN_PREFECT, attempt=1, committed_step=7)
    monkeypatch.setattr("vantage.flows.pools.run_on_pool.run_on_pool", lambda *_, **__: cancelled)
    with orchestrated(workspace, recipe_file, ON_POOL) as orchestrator:
        attempt_all(orchestrator, until="sft")
        stage = attempt(orchestrator, "sft")
    assert (stage.status, stage.exit_code) == ("failed", 75)
    assert "cancelled in Prefect" in str(stage.reason)
    assert exit_code(orchestrator.run.record) == 75


def test_after_the_block_signals_mean_what_they_meant() -> None:
    def own(number: int, _: object) -> None: ...

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    async def stopped() -> list[str]:
        called: list[str] = []
        with stopping(lambda: called.append("stop")):
            for number in numbers[:2]:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.05)
        return called

    try:
        for number in numbers:
            signal.signal(number, own)
        assert asyncio.run(stopped()) == ["stop", "stop"]
        assert [signal.getsignal(number) for number in numbers] == [own] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
def test_an_error_in_the_block_stops_what_runs_beside_it(error: type[BaseException]) -> None:
    called: list[str] = []

    async def fail() -> None:
        with pytest.raises(error), stopping(lambda: called.append("stop")):
            raise error

    asyncio.run(fail())
    assert called == ["stop"]


def test_of_the_errors_of_groups_in_groups_the_first_is_raised() -> None:
    first = ValueError("the cause")
    inner = BaseExceptionGroup("inner", [first, KeyError("later")])
    outer = BaseExceptionGroup("outer", [BaseExceptionGroup("middle", [inner]), OSError("last")])
    with pytest.raises(ValueError, match="the cause") as raised, first_error():
        raise outer
    assert raised.value is first
