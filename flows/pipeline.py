"""The Prefect flow: each step starts when its inputs are ready; each attempt is one task run."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from prefect import flow, runtime, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from pydantic import Field

from vantage.attempts.stopping import first_error, stopping
from vantage.flows.open_runs import orchestrator_of
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.prefect_server.approval_form import answer_in_form, run_of
from vantage.flows.prefect_server.flow_runs import (
    STATES,
    close_attempts,
    close_open_flow_runs,
    page_of,
    run_message,
    state_of,
    tell_that_it_was_scheduled,
    watch_cancellation,
)
from vantage.flows.prefect_server.outages import errors_of_logging_are_quiet
from vantage.flows.prefect_server.overlaps import CANCELS_EARLIER, cancel_earlier
from vantage.flows.prefect_server.pages import progress_page, show_run
from vantage.flows.prefect_server.server import ServerUnavailable, server_name
from vantage.flows.publishing.publishing import publish
from vantage.flows.starting import open_run
from vantage.runs.summary import why
from vantage.runs.watching import PAGE_AT
from vantage.schemas.records.attempt import AttemptRequest
from vantage.schemas.safe_text import without_secrets

WAITING_APPROVAL = STATES["waiting_approval"][1]
MAX_RESTARTS = 50
"""Most restarts of a deployed pipeline after crashes; otherwise it might crash for ever."""


async def order(orchestrator: Orchestrator, *, recipe: str, overrides: Sequence[str], strict: bool) -> None:
    """Run the flow for a run that is open in this process."""
    run = orchestrator.run
    with tags(*tags_of(orchestrator)):
        state: State[State[None]] = await pipeline(
            recipe=recipe,
            overrides=list(overrides),
            workspace=run.workspace.address,
            run_id=run.record.run_id,
            strict=strict,
            return_state=True,
        )
    this = run.record.prefect_flow_run_ids[-1:]
    left = [each for each in run.record.open_flow_runs if each.flow_run_id in this]
    if any(each.status is None for each in left):
        orchestrator.watcher.say(f"  Prefect's flow broke off: {state.message}", "red")
    was_away = orchestrator.outages.prefect.was_noticed
    if was_away or any(
        each.status is not None and state.name != STATES[each.status][1] for each in left
    ):  # Prefect may have recorded an error of its own, such as an outage, and not how the run ended
        await close_open_flow_runs(run, server=server_name(run.workspace.root))
        if any(each.flow_run_id in this for each in run.record.open_flow_runs):
            raise ServerUnavailable("the Prefect server does not answer")
    else:
        run.close_flow_runs(this)  # Prefect has answered that it recorded the end


def tags_of(orchestrator: Orchestrator) -> list[str]:
    """Return tags of a flow run: its recipe and its run."""
    return [f"recipe:{orchestrator.recipe.recipe}", f"run:{orchestrator.run.record.run_id}"]


def _flow_run_name() -> str:
    """Return the run's id; the recipe's name if the run is not open yet."""
    parameters: dict[str, Any] = runtime.flow_run.parameters
    return parameters["run_id"] or Path(parameters["recipe"].splitlines()[0]).stem


@flow(name="vantage", flow_run_name=_flow_run_name, persist_result=False)
async def pipeline(
    recipe: str,
    overrides: list[str] | None = None,
    workspace: str = ".vantage",
    run_id: str | None = None,
    strict: bool = False,
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None,
    restarts: Annotated[int, Field(ge=0, le=MAX_RESTARTS)] = 0,
) -> State[None]:
    """Run all steps, side by side as far as the machine has resources, then publish.

    Args:
        recipe: a recipe's file, the name of a built-in one, or a recipe's text.
        overrides: ``KEY=VALUE``, as after ``--set``.
        workspace: the folder or bucket that holds runs, artifacts and ledger.
        run_id: the run to resume; None: chosen as ``vantage run`` does.
        strict: refuse to reuse artifacts made with other code or libraries.
        seed: in place of the recipe's; None: the recipe's.
        restarts: how often it was started again after a crash; Prefect starts none with more than the most allowed.
    """
    errors_of_logging_are_quiet()
    flow_run_id = str(runtime.flow_run.id)
    given = orchestrator_of(run_id)  # `vantage run` has opened it
    if given is None:
        await tell_that_it_was_scheduled(flow_run_id)
        if CANCELS_EARLIER in runtime.flow_run.tags:
            await cancel_earlier(flow_run_id)
    changes = [*(overrides or []), *([] if seed is None else [f"seed={seed}"])]
    state: State[None] | None = None
    while True:
        with ExitStack() as held:
            orchestrator = given
            if orchestrator is None:
                try:
                    run_id = run_id or await asyncio.to_thread(run_of, flow_run_id, workspace)
                    # A person answers while the run's lock is free, so that the process that resumes the flow run can
                    # take the lock.
                    if run_id and not await _is_answered(run_id, workspace) and state is not None:
                        return state
                    orchestrator = await asyncio.to_thread(
                        open_run, held, recipe, changes, workspace, run_id, strict=strict
                    )
                except ValueError as error:
                    # the recipe, the run or the machine is at fault; the message has the remedy
                    return state_of("failed", without_secrets(str(error)))
                run_id = orchestrator.run.record.run_id
                await _name_flow_run(flow_run_id, orchestrator)
            left = list(orchestrator.inputs)
            async with _begun(flow_run_id, orchestrator, started_by_prefect=given is None):
                while left:
                    steps: dict[str, asyncio.Task[State[None] | None]] = {}
                    async with asyncio.TaskGroup() as side_by_side:
                        for step in left:
                            before = {
                                other: steps[other] for other in _before(step, orchestrator) if other in steps
                            }
                            steps[step] = side_by_side.create_task(when_ready(step, before, orchestrator))
                            steps[step].add_done_callback(partial(_ended, orchestrator, step))
                    left = await _allowed_meanwhile(orchestrator)
            state = await _finish(flow_run_id, orchestrator)
        if given is not None or state.name != WAITING_APPROVAL:
            return state


@asynccontextmanager
async def _begun(
    flow_run_id: str, orchestrator: Orchestrator, *, started_by_prefect: bool
) -> AsyncIterator[None]:
    """Record that this flow run executes an open run; inside the block, stop the run if Prefect or the system asks."""
    await _begin(flow_run_id, orchestrator)
    # Task runs get no tags: for tagged ones Prefect asks its server for a slot, and fails the run if the server is busy.
    drained = orchestrator.drain if started_by_prefect else None
    orchestrator.retries = True
    with (
        TagsContext(current_tags=set()),
        stopping(orchestrator.request_stop, drained=drained),
        first_error(),
    ):
        async with watch_cancellation(
            flow_run_id,
            orchestrator.run.is_cancel_requested,
            orchestrator.cancel,
            orchestrator.outages.prefect,
        ):
            yield


def _before(step: str, orchestrator: Orchestrator) -> list[str]:
    """Return the steps that must be over before a step."""
    first = orchestrator.before_any_stage() if step in orchestrator.recipe.stages else []
    return list(dict.fromkeys([*first, *orchestrator.inputs[step].values()]))


async def _allowed_meanwhile(orchestrator: Orchestrator) -> list[str]:
    """Return blocked steps that a person has allowed while the others ran."""
    if orchestrator.stop.is_set():
        return []
    is_answered = await asyncio.to_thread(orchestrator.take_up_answers)
    blocked = orchestrator.blocked()
    # a step that also waited for others may have taken up the answer for which these steps were blocked
    is_free = any(orchestrator.obstacle(step) is None for step in blocked)
    return blocked if is_answered or is_free else []


async def _is_answered(run_id: str, workspace: str) -> bool:
    """Return whether a person has answered all questions of the run; a deployment's flow run is suspended until
    then."""
    return bool(runtime.deployment.id) and await answer_in_form(run_id, workspace)


async def _name_flow_run(flow_run_id: str, orchestrator: Orchestrator) -> None:
    """Give a flow run that Prefect started the name and tags of its run."""
    async with get_client() as client:
        await client.update_flow_run(
            UUID(flow_run_id), name=orchestrator.run.record.run_id, tags=tags_of(orchestrator)
        )


async def _begin(flow_run_id: str, orchestrator: Orchestrator) -> None:
    """Close flow runs that dead processes left open, then record this one."""
    server = server_name(orchestrator.run.workspace.root)
    orchestrator.run.close_flow_runs(
        [flow_run_id]
    )  # left by an earlier process of this flow run, which was suspended
    await close_open_flow_runs(orchestrator.run, server=server)
    orchestrator.run.add_flow_run(flow_run_id, server=server)
    orchestrator.watcher.say(f"{PAGE_AT}{page_of(flow_run_id)}", "dim")


async def _finish(flow_run_id: str, orchestrator: Orchestrator) -> State[None]:
    """Publish, then report the result to Prefect."""
    run = orchestrator.run
    orchestrator.draw_report()
    for publication in orchestrator.recipe.publish:
        await asyncio.to_thread(publish, publication, orchestrator)
    await show_run(run.record, ledger=orchestrator.ledger, has_report=orchestrator.makes_report)
    status, message = seen_by_prefect(orchestrator, run.outcome()), run_message(run.record)
    if (
        status == "resumable" and orchestrator.stop.leaves_pools
    ):  # the automation of its deployment starts it again
        status, message = "crashed", f"its worker was asked to end\n{message}"
    run.end_flow_run(flow_run_id, status, message, orchestrator.task_runs.ends())
    if not orchestrator.stop.is_set():  # after a stop the attempts may go on, and time is short
        if orchestrator.outages.prefect.was_noticed:
            await orchestrator.task_runs.correct(flow_run_id, stage)
        await close_attempts(run, server=server_name(run.workspace.root))
    return state_of(status, message)


def _ended(orchestrator: Orchestrator, step: str, _: object) -> None:
    orchestrator.ended(step)


async def when_ready(
    step: str, before: Mapping[str, asyncio.Task[State[None] | None]], orchestrator: Orchestrator
) -> State[None] | None:
    """Wait for the steps ``before``, then attempt it; retry while its outcome allows, and skip it if it is blocked."""
    ended = {other: await each for other, each in before.items()}
    # Prefect draws a line from each of these steps, so only the step's inputs are passed, and not all steps that it
    # waits for. A step that a person has approved of since is over, whatever the state of its own task run.
    read = set(orchestrator.inputs[step].values())
    states = [
        each for other, each in ended.items() if other in read and each is not None and each.is_completed()
    ]
    if any(each is not None and each.name == WAITING_APPROVAL for each in ended.values()):
        await asyncio.to_thread(orchestrator.take_up_answers)
    if obstacle := orchestrator.obstacle(step):
        orchestrator.block(step, obstacle)
        return None
    only_reuse = step in orchestrator.in_store
    while True:
        resources = orchestrator.steps[step].resources
        elsewhere = only_reuse or orchestrator.steps[step].pool is not None
        lent = nullcontext(None) if elsewhere else orchestrator.machine.reserve(resources)
        async with lent as share:
            request = await asyncio.to_thread(orchestrator.request, step, share, only_reuse=only_reuse)
            if request is None:
                return None
            attempt = stage.with_options(task_run_name=orchestrator.attempt_name(request))
            state: State[None] = await attempt(request, return_state=True, wait_for=states)  # type: ignore[misc]
            orchestrator.task_runs.ended(state)
        is_extended = await asyncio.to_thread(orchestrator.extends, step)
        if not is_extended and (state.name != "Resumable" or not orchestrator.tries_again(step)):
            return state
        only_reuse = False


@task(name="stage", cache_policy=NO_CACHE, persist_result=False)
async def stage(request: AttemptRequest) -> State[None]:
    """Run one attempt at a step of a run that is open in this process; a thread waits for the computation."""
    orchestrator = orchestrator_of(request.run_id)
    assert orchestrator is not None, "the flow opened it"
    orchestrator.task_runs.begins()
    async with progress_page(request.step, lambda: orchestrator.progress(request.step)) as progress:
        record = await asyncio.to_thread(orchestrator.attempt, request)
        progress.is_complete = record.digest is not None
    return state_of(seen_by_prefect(orchestrator, record.status), why(record))


def seen_by_prefect(orchestrator: Orchestrator, status: str) -> str:
    """Return the status to show in Prefect: a run cancelled there is shown as cancelled; to Vantage it is resumable."""
    return "cancelled" if orchestrator.cancelled and status == "resumable" else status
