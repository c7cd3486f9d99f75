"""Flow runs and task runs get the state of their records once their server answers; Prefect is made up."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from obstore.store import MemoryStore
from prefect.client.schemas.objects import StateType

from vantage.attempts.exit_codes import ExitCode
from vantage.flows.prefect_server.flow_runs import _close, state_of
from vantage.runs.record import OpenFlowRun, RunRecord, StageRecord, TaskRunEnd
from vantage.schemas.records.artifacts import Dataset
from vantage.schemas.records.attempt import AttemptOutcome, Failure
from vantage.storage.messages import messages_of
from vantage.storage.storage import Storage

KEY = "0" * 64
ID = str(UUID(int=1))
CRASH = (StateType.CRASHED, "Crashed")
ERROR = (StateType.FAILED, "Failed")
RUNNING = (StateType.RUNNING, "Running")
CANCELLED = (StateType.CANCELLED, "Cancelled")

MADE = AttemptOutcome(
    status="made",
    artifact=Dataset(uri="objects/1", digest="1" * 64, stage_key=KEY, parents={}, content="prompts"),
)


def failed(cause: Any, code: ExitCode, message: str) -> AttemptOutcome:
    failure = Failure(exit_code=code, cause=cause, message=message, remedy="do this")
    return AttemptOutcome(status="failed", failure=failure)


DIVERGED = failed("diverged", ExitCode.BAD_INPUT, "the loss is not finite")
PREEMPTED = failed("preempted", ExitCode.RESUME, "stopped after step 4")
LOST = failed("killed", ExitCode.RESUME, "its process was lost")


class Prefect:
    """A server that knows one flow run with one task run."""

    def __init__(self, shown: tuple[StateType, str], task_run: str = "") -> None:
        self.shown = shown
        self.task_run = task_run
        self.set: list[tuple[str, str | None, str | None]] = []

    def _state(self) -> Any:
        final = self.shown[0] in (
            StateType.COMPLETED,
            StateType.FAILED,
            StateType.CRASHED,
            StateType.CANCELLED,
        )
        return SimpleNamespace(
            type=self.shown[0], name=self.shown[1], is_final=lambda: final, is_paused=lambda: False
        )

    async def read_flow_run(self, flow_run_id: UUID) -> Any:
        return SimpleNamespace(id=flow_run_id, state=self._state())

    async def read_task_runs(self, **_: object) -> list[Any]:
        return [SimpleNamespace(id="task", name=self.task_run, state=self._state())] if self.task_run else []

    async def set_flow_run_state(self, _: object, state: Any, force: bool) -> None:
        self.set.append(("flow run", state.name, state.message))

    async def set_task_run_name(self, _: object, name: str) -> None:
        self.set.append(("name", name, None))

    async def set_task_run_state(self, _: object, state: Any, force: bool) -> None:
        self.set.append(("task run", state.name, state.message))


def close(
    prefect: Prefect, left: OpenFlowRun, storage: Any, *, ending: bool = False, **stages: StageRecord
) -> set[str]:
    record = RunRecord.model_construct(open_flow_runs=(left,), stages=stages)
    return asyncio.run(_close(cast(Any, prefect), record, "server", cast(Storage, storage), ending=ending))


@pytest.mark.parametrize(
    "shown, outcome, becomes",
    [
        (CRASH, MADE, ("Completed", "")),
        (ERROR, MADE, ("Completed", "")),
        (RUNNING, MADE, ("Completed", "")),
        (CANCELLED, MADE, None),
        ((StateType.COMPLETED, "Completed"), MADE, None),
        (CRASH, DIVERGED, ("Failed", "the loss is not finite; do this; exit code 65")),
        (CRASH, PREEMPTED, ("Resumable", "stopped after step 4")),
        (CRASH, LOST, None),
        (RUNNING, LOST, ("Failed", None)),
    ],
)
def test_an_attempt_is_shown_as_its_outcome_in_the_storage(
    shown: tuple[StateType, str], outcome: AttemptOutcome, becomes: tuple[str, str | None] | None
) -> None:
    remote, prefect = MemoryStore(), Prefect(shown)
    messages = messages_of(cast(Any, remote), KEY, 3)
    data = outcome.model_dump_json().encode()
    left = OpenFlowRun(flow_run_id=ID, server="server", attempt=messages.name)
    assert close(prefect, left, SimpleNamespace(remote=remote)) == set(), "it has not ended"
    assert prefect.set == []
    messages.create("outcome.json", data)
    assert close(prefect, left, SimpleNamespace(remote=remote)) == {ID}
    if becomes is None:
        assert prefect.set == []
        return
    [(what, name, message)] = prefect.set
    assert (what, name) == ("flow run", becomes[0])
    assert becomes[1] in (None, message)


@pytest.mark.parametrize("shown, closed", [(RUNNING, set()), (CRASH, {ID})])
def test_a_process_that_is_ending_records_its_own_end(shown: tuple[StateType, str], closed: set[str]) -> None:
    remote, prefect = MemoryStore(), Prefect(shown)
    messages = messages_of(cast(Any, remote), KEY, 3)
    messages.create("outcome.json", MADE.model_dump_json().encode())
    left = OpenFlowRun(flow_run_id=ID, server="server", attempt=messages.name)
    assert close(prefect, left, SimpleNamespace(remote=remote), ending=True) == closed
    assert len(prefect.set) == len(closed)


def test_a_run_that_ended_during_an_outage_is_shown_as_run_json_has_it() -> None:
    prefect = Prefect(CRASH, "sft · attempt 2")
    left = OpenFlowRun(flow_run_id=ID, server="server", status="completed", message="9 completed")
    closed = close(prefect, left, SimpleNamespace(), sft=StageRecord(status="completed", attempt=2))
    assert closed == {ID}
    assert prefect.set == [("task run", "Completed", ""), ("flow run", "Completed", "9 completed")]


@pytest.mark.parametrize("shown", [RUNNING, CRASH, (StateType.PENDING, "Pending")])
@pytest.mark.parametrize(
    "name, status, becomes",
    [
        ("sft · attempt 1", "resumable", "Resumable"),
        # the stage's record is right: an outage ended the task run
        ("sft · attempt 2", "failed", "Completed"),
        ("policy · 8 iterations · attempt 1", "reused", "Reused"),
    ],
)
def test_a_task_run_whose_name_was_lost_is_shown_as_it_ended(
    shown: tuple[StateType, str], name: str, status: str, becomes: str
) -> None:
    """Prefect's first event of a task run has a name that Prefect makes up."""
    prefect = Prefect(shown, "stage-1a2")
    end = TaskRunEnd(name=name, status=status, message="why")
    left = OpenFlowRun(flow_run_id=ID, server="server", status="completed", task_runs={"task": end})
    stages = {"sft": StageRecord(status="completed", attempt=2), "policy": StageRecord(status="completed")}
    assert close(prefect, left, SimpleNamespace(), **stages) == {ID}
    message = "" if becomes == "Completed" else "why"
    assert prefect.set[:2] == [("name", name, None), ("task run", becomes, message)]


def test_a_task_run_whose_end_nobody_recorded_is_crashed() -> None:
    prefect = Prefect(RUNNING, "stage-1a2")
    other = TaskRunEnd(name="rm · attempt 1", status="completed")
    left = OpenFlowRun(flow_run_id=ID, server="server", status="completed", task_runs={"other": other})
    close(prefect, left, SimpleNamespace(), sft=StageRecord(status="completed", attempt=1))
    assert prefect.set[0][:2] == ("task run", "Crashed")


def test_a_killed_run_stays_crashed() -> None:
    prefect = Prefect(CRASH, "sft · attempt 2")
    left = OpenFlowRun(flow_run_id=ID, server="server")
    assert close(prefect, left, SimpleNamespace(), sft=StageRecord(status="running", attempt=2)) == {ID}
    assert prefect.set == []


def test_a_task_run_of_a_killed_process_is_crashed_though_a_later_attempt_completed() -> None:
    prefect = Prefect(RUNNING, "sft · attempt 2")
    left = OpenFlowRun(flow_run_id=ID, server="server")
    close(prefect, left, SimpleNamespace(), sft=StageRecord(status="completed", attempt=2))
    assert [each[:2] for each in prefect.set] == [("task run", "Crashed"), ("flow run", "Crashed")]


def test_states_have_the_names_that_the_cases_above_use() -> None:
    assert state_of("crashed", "").name == "Crashed"
    assert state_of("failed", "").name == "Failed"
