"""Flow runs in Prefect: their final states, closing those without one, and cancellation from Prefect."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Crashed
from prefect.utilities.urls import url_for

from vantage.attempts.exit_codes import may_be_retried, may_be_retried_once
from vantage.flows.prefect_server.outages import Outage
from vantage.ledger.tracking import without_password
from vantage.runs.record import OpenFlowRun, RunRecord, StageRecord, TaskRunEnd
from vantage.runs.run import Run, inactive_runs
from vantage.runs.summary import reasons, why
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import AttemptOutcome
from vantage.storage.messages import Messages
from vantage.storage.storage import Storage

POLL_SECONDS = 2.0
"""Seconds between two polls of Prefect for cancellation; it sends no notification."""

CLOSING_SECONDS = 5.0
"""Seconds that a run that ends waits for the processes of its attempts to record their own ends in Prefect."""

STATES = {
    "completed": (StateType.COMPLETED, "Completed"),
    "reused": (StateType.COMPLETED, "Reused"),
    "gate_closed": (StateType.FAILED, "GateClosed"),
    "waiting_approval": (StateType.FAILED, "WaitingApproval"),
    "resumable": (StateType.FAILED, "Resumable"),
    "cancelled": (StateType.CANCELLED, "Cancelled"),
    "failed": (StateType.FAILED, "Failed"),
    "crashed": (StateType.CRASHED, "Crashed"),
}
"""Status of a stage or run → Prefect's type of state, and the displayed name.

``crashed`` is for a run that its deployment should start again.
"""

log = logging.getLogger(__name__)


def state_of(status: str, message: str) -> State[None]:
    """Return Prefect's state for a status of ours, without a result."""
    kind, name = STATES[status]
    return State(type=kind, name=name, message=message)


def status_of(state: State[Any]) -> str | None:
    """Return the status of ours that a state of Prefect shows; None: none of them."""
    return next((status for status, shown in STATES.items() if shown == (state.type, state.name)), None)


def status_of_attempt(outcome: AttemptOutcome) -> tuple[str, str]:
    """Return the status and the message of an attempt's flow run."""
    if outcome.artifact is not None:
        return ("reused" if outcome.status == "reused" else "completed"), ""
    failure = outcome.failure
    if failure is None or failure.cause == "preempted":
        return "resumable", failure.message if failure else "stopped before it began"
    remedy = failure.remedy
    if may_be_retried(failure.exit_code) or may_be_retried_once(failure.exit_code):
        remedy = "the run that asked for it tries again, or names what to do"
    return "failed", f"{failure.message}; {remedy}; exit code {failure.exit_code}"


def run_message(record: RunRecord) -> str:
    """Return the message of a run's state: each unsuccessful stage with its reason, then the number of successful ones."""
    lines = reasons(record)
    blocked = [name for name, stage in record.stages.items() if stage.status == "blocked"]
    if blocked:
        lines.append(f"not started: {', '.join(blocked)}")
    counts = {
        status: sum(stage.status == status for stage in record.stages.values())
        for status in ("completed", "reused")
    }
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return "\n".join(filter(None, lines))


def page_of(flow_run_id: str) -> str:
    """Return the page of a flow run on the server that this process uses."""
    return without_password(url_for("flow-run", UUID(flow_run_id)) or "")


async def tell_that_it_was_scheduled(flow_run_id: str) -> None:
    """Emit the event ``Scheduled`` of a flow run that a schedule created, since Prefect 3.8's scheduler emits none.

    If the flow run begins within five minutes, its later events follow the missing one, and the server hides them from
    automations for 15 minutes, so a crashed pipeline would be restarted late. That is all that happens if the server
    fails now.
    """
    try:
        async with get_client() as client:
            flow_run = await client.read_flow_run(UUID(flow_run_id))
            if not flow_run.auto_scheduled:
                return
            states = await client.read_flow_run_states(flow_run.id)
    except Exception:
        log.debug("flow run %s cannot be looked at", flow_run_id, exc_info=True)
        return
    first = min(states, key=lambda state: state.timestamp)
    resource = {
        "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
        "prefect.resource.name": flow_run.name,
    }
    # A state's event has the state's id, which the next event names as its predecessor
    emit_event(f"prefect.flow-run.{first.name}", resource, occurred=first.timestamp, id=first.id)


@asynccontextmanager
async def watch_cancellation(
    flow_run_id: str, is_requested: Callable[[], bool], cancel: Callable[[], None], outage: Outage
) -> AsyncIterator[None]:
    """Call ``cancel`` inside this block if the flow run is cancelled in Prefect, or ``is_requested`` returns True.

    ``outage``: reports that Prefect does not answer.
    """
    watch = asyncio.create_task(_watch(flow_run_id, is_requested, cancel, outage))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait([watch])


async def _watch(
    flow_run_id: str, is_requested: Callable[[], bool], cancel: Callable[[], None], outage: Outage
) -> None:
    async with get_client() as client:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                if await asyncio.to_thread(is_requested):
                    cancel()
                    return
                flow_run = await client.read_flow_run(UUID(flow_run_id))
                outage.is_over()
            except ObjectNotFound:
                log.debug("Prefect knows flow run %s no longer", flow_run_id)
                continue
            except (HTTPError, PrefectException) as error:
                outage.noticed(error)
                continue
            except Exception:  # a dead bucket is noticed when the run ends
                log.debug("flow run %s cannot be looked at", flow_run_id, exc_info=True)
                continue
            if flow_run.state_type in (StateType.CANCELLING, StateType.CANCELLED):
                cancel()
                return


async def close_open_flow_runs(run: Run, *, server: str) -> None:
    """Set the final state of flow runs that Prefect still shows as running, or as failed though they ended otherwise.

    These are the flow runs of ``run`` and of its attempts on pools, and those of all inactive runs of the workspace, on
    ``server``. Flow runs that cannot be closed now stay open for the next run.
    """
    storage = run.workspace.storage

    def is_left(record: RunRecord) -> bool:
        return any(each.server == server for each in record.open_flow_runs)

    async with get_client() as client:
        run.close_flow_runs(await _close(client, run.record, server, storage, executed=True))
        # In threads: reading from a bucket takes seconds, in which this loop must notice a request to stop.
        for record in await asyncio.to_thread(_records, run.workspace, is_left):
            closed = await _close(client, record, server, storage)
            await asyncio.to_thread(_set_closed, run.workspace, record.run_id, closed)


async def close_attempts(run: Run, *, server: str) -> None:
    """Set the state of the run's attempts on pools that Prefect shows as crashed or failed, though they ended otherwise.

    A process that is about to record its end has a few seconds for that. Flow runs that cannot be closed stay open for
    the next run.
    """
    try:
        async with asyncio.timeout(CLOSING_SECONDS), get_client() as client:
            while left := [
                each for each in run.record.open_flow_runs if each.attempt and each.server == server
            ]:
                record = run.record.model_copy(update={"open_flow_runs": tuple(left)})
                if closed := await _close(client, record, server, run.workspace.storage, ending=True):
                    run.close_flow_runs(closed)
                await asyncio.sleep(POLL_SECONDS / 2)
    except Exception:
        log.debug("the attempts of run %s are not closed", run.record.run_id, exc_info=True)


def _records(workspace: Workspace, wanted: Callable[[RunRecord], bool]) -> list[RunRecord]:
    """Return the wanted runs that no process executes."""
    return [run.record for run in inactive_runs(workspace, wanted)]


def _set_closed(workspace: Workspace, run_id: str, flow_run_ids: set[str]) -> None:
    for run in inactive_runs(workspace, lambda record: record.run_id == run_id):
        run.close_flow_runs(flow_run_ids)


async def _close(
    client: PrefectClient,
    record: RunRecord,
    server: str,
    storage: Storage,
    *,
    executed: bool = False,
    ending: bool = False,
) -> set[str]:
    """Close a run's open flow runs; returns the ids of those that are closed or no longer known to the server.

    A suspended flow run waits for a person and stays open, unless this process executes its run (``executed``) in
    another flow run. If its process may be about to end (``ending``), an attempt stays open until its state is final.
    """
    closed = set()
    for each in record.open_flow_runs:
        if each.server != server:
            continue
        try:
            if each.attempt is not None:
                is_closed = await _close_attempt(client, each, storage, ending=ending)
            else:
                is_closed = await _close_one(client, each, record.stages, executed=executed)
            if not is_closed:
                continue
        except ObjectNotFound:
            log.debug("Prefect knows flow run %s no longer", each.flow_run_id)
        except Exception:  # the server fails; the next run tries again
            log.debug("flow run %s is not closed", each.flow_run_id, exc_info=True)
            continue
        closed.add(each.flow_run_id)
    return closed


async def _close_attempt(
    client: PrefectClient, open_flow_run: OpenFlowRun, storage: Storage, *, ending: bool
) -> bool:
    """Show an attempt on a pool with its outcome in the storage; returns False if it has not ended."""
    assert open_flow_run.attempt is not None, "an attempt's"
    flow_run = await client.read_flow_run(UUID(open_flow_run.flow_run_id))
    messages = Messages(storage.remote, open_flow_run.attempt)
    data = await asyncio.to_thread(messages.read, "outcome.json")
    if data is None:
        return False
    outcome = AttemptOutcome.model_validate_json(data)
    status, message = status_of_attempt(outcome)
    is_lost = outcome.failure is not None and outcome.failure.cause == "killed"
    is_final = flow_run.state is not None and flow_run.state.is_final()
    if ending and not is_final:
        return False
    if _is_wrong(flow_run.state, status) and not (is_lost and is_final):
        await client.set_flow_run_state(flow_run.id, state_of(status, message), force=True)
    return True


def _is_wrong(state: State | None, status: str) -> bool:
    """Return whether a state must be replaced by that of a status: it is not final, or it is an error that did not happen.

    A state that a person chose, such as Cancelled, is right.
    """
    if state is None or not state.is_final():
        return True
    kind, name = STATES[status]
    return state.type in (StateType.CRASHED, StateType.FAILED) and (state.type, state.name) != (kind, name)


async def _close_one(
    client: PrefectClient,
    open_flow_run: OpenFlowRun,
    stages: Mapping[str, StageRecord],
    *,
    executed: bool,
) -> bool:
    """Close the flow run, unless it waits for a person; returns whether it is closed."""
    flow_run = await client.read_flow_run(UUID(open_flow_run.flow_run_id))
    if flow_run.state is not None and flow_run.state.is_paused():
        if executed:
            state = state_of("cancelled", "its run goes on in another process")
            await client.set_flow_run_state(flow_run.id, state, force=True)
        return executed
    its = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
    for task_run in await client.read_task_runs(flow_run_filter=its):
        end = _end_of(task_run, open_flow_run, stages)
        if end and task_run.name != end.name:
            await client.set_task_run_name(task_run.id, end.name)
        if end and _is_wrong(task_run.state, end.status):
            await client.set_task_run_state(task_run.id, state_of(end.status, end.message), force=True)
        elif task_run.state is None or not task_run.state.is_final():
            await client.set_task_run_state(task_run.id, _crashed(), force=True)
    if open_flow_run.status and _is_wrong(flow_run.state, open_flow_run.status):
        state = state_of(open_flow_run.status, open_flow_run.message)
        await client.set_flow_run_state(flow_run.id, state, force=True)
    elif flow_run.state is None or not flow_run.state.is_final():
        await client.set_flow_run_state(flow_run.id, _crashed(), force=True)
    return True


def _end_of(
    task_run: TaskRun, open_flow_run: OpenFlowRun, stages: Mapping[str, StageRecord]
) -> TaskRunEnd | None:
    """Return how a task run ended; None: its process died before it recorded the end, or it ended with an error of
    Prefect."""
    if open_flow_run.status is None:
        return None
    recorded = open_flow_run.task_runs.get(str(task_run.id))
    name = recorded.name if recorded else task_run.name  # an earlier version recorded no task runs
    for step, stage in stages.items():  # if an outage has ended the task run, our record is right
        if name == f"{step} · attempt {stage.attempt or 1}" and stage.status in STATES:
            return TaskRunEnd(name=name, status=stage.status, message=why(stage))
    return recorded


def _crashed() -> State[None]:
    return Crashed(message="its process was killed; a later flow run of the same name goes on")
