"""Task runs are corrected after an outage; Prefect is made up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from httpx import ConnectError
from prefect.client.schemas.objects import State, StateDetails, StateType
from prefect.states import Crashed

from vantage.flows.prefect_server.flow_runs import state_of
from vantage.flows.prefect_server.task_runs import TaskRuns
from vantage.runs.record import TaskRunEnd

FLOW_RUN = str(UUID(int=9))


class Prefect:
    """A server that knows some task runs, by the number of their id."""

    def __init__(self, shown: dict[int, State[None]]) -> None:
        self.shown = shown
        self.created: list[tuple[UUID, str, str]] = []
        self.is_away = False

    async def read_task_runs(self, **_: object) -> list[Any]:
        if self.is_away:
            raise ConnectError("All connection attempts failed")
        return [SimpleNamespace(id=UUID(int=each), state=state) for each, state in self.shown.items()]

    async def create_task_run(
        self, task: object, flow_run_id: UUID, dynamic_key: str, *, id: UUID, name: str, task_inputs: object
    ) -> None:
        assert flow_run_id == UUID(FLOW_RUN)
        self.created.append((id, dynamic_key, name))

    async def set_task_run_state(self, task_run_id: UUID, state: State[None], force: bool) -> None:
        assert force
        self.shown[task_run_id.int] = state


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Prefect:
    """Yield a server that knows two of three task runs: one with its final state, and one that it shows as running."""
    server = Prefect({1: state_of("reused", ""), 2: State(type=StateType.RUNNING)})

    @asynccontextmanager
    async def client() -> AsyncIterator[Prefect]:
        yield server

    monkeypatch.setattr("prefect.client.orchestration.get_client", client)
    return server


def ended(*states: State[None]) -> TaskRuns:
    """Return task runs 1, 2, … that have begun in this process and ended with these states."""
    made = TaskRuns()
    for number, state in enumerate(states, start=1):
        run = SimpleNamespace(
            id=UUID(int=number), dynamic_key=f"key {number}", name=f"step {number}", task_inputs={}
        )
        made._begun[run.id] = cast(Any, run)
        details = StateDetails(task_run_id=run.id)
        made.ended(state.model_copy(update={"state_details": details}))
    return made


def test_a_state_that_was_lost_is_set_and_a_task_run_that_was_lost_is_created(prefect: Prefect) -> None:
    known = ended(
        state_of("reused", ""), state_of("resumable", "stopped after step 4"), state_of("completed", "")
    )
    first = prefect.shown[1]
    asyncio.run(known.correct(FLOW_RUN, cast(Any, None)))
    assert prefect.created == [(UUID(int=3), "key 3", "step 3")]
    assert prefect.shown[1] is first, "it was right"
    assert [(each.name, each.message) for each in prefect.shown.values()] == [
        ("Reused", ""),
        ("Resumable", "stopped after step 4"),
        ("Completed", ""),
    ]


def test_how_they_ended_is_told_by_their_ids() -> None:
    known = ended(
        state_of("reused", ""), Crashed(message="a bug"), state_of("resumable", "stopped after step 4")
    )
    known.ended(
        state_of("completed", "").model_copy(update={"state_details": StateDetails(task_run_id=UUID(int=8))})
    )
    assert known.ends() == {
        str(UUID(int=1)): TaskRunEnd(name="step 1", status="reused"),
        str(UUID(int=2)): TaskRunEnd(name="step 2", status="crashed", message="a bug"),
        str(UUID(int=3)): TaskRunEnd(name="step 3", status="resumable", message="stopped after step 4"),
    }


def test_a_server_that_is_away_again_stops_no_run(prefect: Prefect) -> None:
    prefect.is_away = True
    asyncio.run(ended(state_of("completed", "")).correct(FLOW_RUN, cast(Any, None)))
    assert prefect.created == []
