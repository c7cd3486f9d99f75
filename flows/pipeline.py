"""The order of work: every stage as soon as all that it reads is there, one Prefect task run for each attempt."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import nullcontext

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateType

from flows.jobs import resources_of
from flows.machine import Machine, Share
from flows.pages import close_interrupted, progress_page, show_run
from flows.publishing import publish
from flows.stage_life import StageLife
from flows.stopping import stopping

MAX_ATTEMPTS = 3
"""Attempts at a stage within one run, while the cause of each end allows another (a lost or preempted process)."""

STATES = {
    "completed": (StateType.COMPLETED, "Completed"),
    "reused": (StateType.COMPLETED, "Reused"),
    "gate_closed": (StateType.FAILED, "GateClosed"),
    "resumable": (StateType.FAILED, "Resumable"),
    "failed": (StateType.FAILED, "Failed"),
}
"""Status of a stage or run → Prefect's type of state, and the name that a person sees there."""


class Place:
    """Where a run's stages take place."""

    __slots__ = ("ended", "in_store", "machine")  # Prefect takes apart and shows what has a __dict__

    def __init__(
        self,
        machine: Machine,
        in_store: Collection[str] = (),
        ended: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Hold what the stages share.

        Args:
            machine: other runs of this process may share it.
            in_store: steps whose artifact is there; they ask the machine for nothing, or they would wait for all who
                compute.
            ended: told of every step that is over, however it ended.
        """
        self.machine = machine
        self.in_store = in_store
        self.ended = ended


@flow(name="vantage", flow_run_name="{run_id}", persist_result=False, validate_parameters=False)
async def pipeline(run_id: str, life: StageLife, place: Place) -> State[None]:
    """All stages, side by side where the machine suffices, then what is published."""
    await close_interrupted(life.run.record.prefect_flow_run_ids)
    life.run.add_flow_run(str(runtime.flow_run.id))
    states: dict[str, asyncio.Task[State[None] | None]] = {}
    with stopping(life.request_stop):
        async with asyncio.TaskGroup() as side_by_side:
            for step, reads in life.inputs.items():
                first = life.before_any_stage() if step in life.recipe.stages else []
                before = [states[other] for other in dict.fromkeys([*first, *reads.values()])]
                states[step] = side_by_side.create_task(when_ready(step, before, life, place))
                states[step].add_done_callback(lambda _, step=step: place.ended(step))
    for publication in life.recipe.publish:
        await asyncio.to_thread(publish, publication, life)
    await show_run(life.run.record, mlflow=life.ledger.where())
    return _state(life.run.outcome(), life.run.record.run_id)


async def when_ready(
    step: str, before: list[asyncio.Task[State[None] | None]], life: StageLife, place: Place
) -> State[None] | None:
    """A stage after all that it reads: not at all where something is in its way, again where that can help."""
    states = [await each for each in before]
    state = None
    if obstacle := life.obstacle(step):
        life.block(step, obstacle)
        return None
    for number in range(MAX_ATTEMPTS):
        looks_up = step in place.in_store and number == 0
        lent = nullcontext(None) if looks_up else place.machine.lend(resources_of(life.recipe, step))
        async with lent as share:
            state = await stage(step, life.attempt(step), life, share, return_state=True, wait_for=states)  # type: ignore[misc]
        if state.name != "Resumable" or life.stop.is_set():
            break
    return state


@task(name="stage", task_run_name="{step} · attempt {attempt}", cache_policy=NO_CACHE, persist_result=False)
async def stage(step: str, attempt: int, life: StageLife, share: Share | None) -> State[None]:
    """One attempt at a stage, in a thread that waits for the stage's process; without a share it only looks the artifact up."""
    async with progress_page(step, lambda: life.progress(step)):
        record = await asyncio.to_thread(life.live, step, share, from_store=share is None)
    return _state(record.status, record.reason or " · ".join(map(str, record.verdicts)))


def _state(status: str, message: str) -> State[None]:
    """Prefect's state for a status of ours; no result is ever kept there."""
    kind, name = STATES[status]
    return State(type=kind, name=name, message=message)
