"""Correct the task runs of this process's flow run that Prefect shows wrongly, or not at all, after an outage."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any
from uuid import UUID

from vantage.runs.record import TaskRunEnd

if TYPE_CHECKING:  # Prefect takes seconds to load, and a run whose artifacts all exist does not need it
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

CORRECTING_SECONDS = 30.0
"""Longest time for the corrections at a run's end."""

log = logging.getLogger(__name__)


class TaskRuns:
    """The task runs that began in this process, and how they ended.

    Prefect's client sends the states of task runs as events, and the server answers none of them. While its database is
    away, the server tries six times to record an event, at intervals of five seconds or more, and then drops it.
    """

    def __init__(self) -> None:
        self._begun: dict[UUID, TaskRun] = {}
        self._ended: dict[UUID, State[Any]] = {}

    def begins(self) -> None:
        """Remember the task run that calls this."""
        from prefect.context import TaskRunContext

        context = TaskRunContext.get()
        assert context is not None, "called in a task"
        self._begun[context.task_run.id] = context.task_run

    def ended(self, state: "State[Any]") -> None:
        """Remember the final state that a task run returned."""
        if state.state_details.task_run_id is not None:
            self._ended[state.state_details.task_run_id] = state

    def ends(self) -> dict[str, TaskRunEnd]:
        """Return task run's id → how it ended, without states that correspond to none of our statuses."""
        from vantage.flows.prefect_server.flow_runs import status_of

        return {
            str(task_run_id): TaskRunEnd(
                name=self._begun[task_run_id].name, status=status, message=state.message or ""
            )
            for task_run_id, state in self._ended.items()
            if task_run_id in self._begun and (status := status_of(state)) is not None
        }

    async def correct(self, flow_run_id: str, task: "Task[..., Any]") -> None:
        """Create the task runs that the server does not know, and correct states that are not final.

        Task runs keep their ids, so that an event which the server records late changes nothing: its time is earlier.
        If the server is away again, its states stay as they are, and no error is raised.
        """
        try:
            async with asyncio.timeout(CORRECTING_SECONDS):
                await self._correct(flow_run_id, task)
        except Exception:
            log.debug("the task runs of flow run %s are not corrected", flow_run_id, exc_info=True)

    async def _correct(self, flow_run_id: str, task: "Task[..., Any]") -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
        from prefect.client.schemas.objects import State

        its = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run_id)]))
        async with get_client() as client:
            shown = {each.id: each for each in await client.read_task_runs(flow_run_filter=its)}
            for task_run_id, state in self._ended.items():
                known, begun = shown.get(task_run_id), self._begun.get(task_run_id)
                if known is None and begun is not None:
                    await client.create_task_run(
                        task,
                        UUID(flow_run_id),
                        begun.dynamic_key,
                        id=task_run_id,
                        name=begun.name,
                        task_inputs=begun.task_inputs,
                    )
                if known is None or known.state is None or not _are_equal(known.state, state):
                    final: State[None] = State(type=state.type, name=state.name, message=state.message)
                    await client.set_task_run_state(task_run_id, final, force=True)


def _are_equal(one: "State[Any]", other: "State[Any]") -> bool:
    return (one.type, one.name) == (other.type, other.name)
