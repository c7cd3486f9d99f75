"""The order of work: every stage as soon as all that it reads is there, one Prefect task run for each attempt."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial

from prefect import (
    flow,
    runtime,
    tags,
    task,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TagsContext

from flows.attempts.jobs import resources_of
from flows.attempts.stage_life import StageLife
from flows.machine import Machine, Share
from flows.prefect_server.flow_runs import (
    cancelled_by,
    close_left_open,
    page_of,
    state_of,
    told_of_run,
    told_of_stage,
)
from flows.prefect_server.pages import progress_page, show_run
from flows.prefect_server.server import server_name
from flows.runs.publishing import publish
from flows.stopping import first_error, stopping

MAX_ATTEMPTS = 3
"""Attempts at a stage within one run, while the cause of each end allows another (a lost or preempted process)."""


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


async def order(life: StageLife, place: Place) -> None:
    """Have Prefect order the run's stages, in a flow run that is found by its recipe and by its run."""
    run = life.run
    with tags(f"recipe:{life.recipe.recipe}", f"run:{run.record.run_id}"):
        state = await pipeline(run.record.run_id, life, place, return_state=True)
    this = run.record.prefect_flow_run_ids[-1:]
    if any(each.flow_run_id in this and each.status is None for each in run.record.open_flow_runs):
        life.watcher.say(f"  Prefect's flow broke off: {state.message}", "red")
    run.close_flow_runs(this)  # Prefect has answered that it recorded the end


@flow(name="vantage", flow_run_name="{run_id}", persist_result=False, validate_parameters=False)
async def pipeline(run_id: str, life: StageLife, place: Place) -> State[None]:
    """All stages, side by side where the machine suffices, then what is published."""
    flow_run_id, server = str(runtime.flow_run.id), server_name(life.run.workspace.root)
    await close_left_open(life.run, server=server)
    life.run.add_flow_run(flow_run_id, server=server)
    life.watcher.say(f"  Prefect shows it at {page_of(flow_run_id)}", "dim")
    states: dict[str, asyncio.Task[State[None] | None]] = {}
    # Task runs get no tags: for each of them Prefect would ask its server for a place, and end the run if it is busy.
    with TagsContext(current_tags=set()), stopping(life.request_stop), first_error():
        async with cancelled_by(flow_run_id, life.cancel), asyncio.TaskGroup() as side_by_side:
            for step, reads in life.inputs.items():
                first = life.before_any_stage() if step in life.recipe.stages else []
                before = [states[other] for other in dict.fromkeys([*first, *reads.values()])]
                states[step] = side_by_side.create_task(when_ready(step, before, life, place))
                states[step].add_done_callback(partial(_ended, place, step))
    for publication in life.recipe.publish:
        await asyncio.to_thread(publish, publication, life)
    await show_run(life.run.record, mlflow=life.ledger.where())
    status, message = seen_by_prefect(life, life.run.outcome()), told_of_run(life.run.record)
    life.run.end_flow_run(flow_run_id, status, message)
    return state_of(status, message)


def _ended(place: Place, step: str, _: object) -> None:
    place.ended(step)


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
    return state_of(seen_by_prefect(life, record.status), told_of_stage(record))


def seen_by_prefect(life: StageLife, status: str) -> str:
    """What was cancelled in Prefect is shown there as cancelled; to us it is a run to go on with, like any other."""
    return "cancelled" if life.cancelled and status == "resumable" else status
