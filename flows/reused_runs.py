"""Show runs that reused everything among Prefect's flow runs.

Such a run starts no server and no flow, since no stage has to run. It gets a flow run in its final state: at once if a
server is configured, else from the next process that has a server of the workspace.
"""

import asyncio
import logging

from prefect.client.orchestration import PrefectClient, get_client

from vantage.flows.pipeline import pipeline
from vantage.flows.prefect_server.flow_runs import run_message, state_of
from vantage.runs.record import RunRecord
from vantage.runs.run import Run, inactive_runs
from vantage.runs.workspace import Workspace

log = logging.getLogger(__name__)

_SECONDS = 20.0
"""Most seconds that a run which has ended waits for Prefect."""


async def show_run(run: Run) -> bool:
    """Create the flow run of this process's run, which has ended; returns whether Prefect has it.

    Prefect must not stop a run, so an error leaves it for the next process.
    """
    try:
        async with asyncio.timeout(_SECONDS), get_client() as client:
            _set_shown(run, await _create(client, run.record, run.workspace))
    except Exception:
        log.debug("run %s has no flow run in Prefect yet", run.record.run_id, exc_info=True)
        return False
    return True


async def show_earlier_runs(workspace: Workspace) -> None:
    """Create the missing flow runs of earlier runs of the workspace that ended while no server answered."""
    try:
        async with get_client() as client:
            # Each is locked while it is yielded, so that no other process creates its flow run too
            for run in inactive_runs(workspace, _is_missing):
                _set_shown(run, await _create(client, run.record, workspace))
    except Exception:
        log.debug("earlier runs have no flow runs in Prefect yet", exc_info=True)


def _is_missing(record: RunRecord) -> bool:
    return record.lacks_flow_run


def _set_shown(run: Run, flow_run_id: str) -> None:
    run.update(lacks_flow_run=False, prefect_flow_run_ids=(*run.record.prefect_flow_run_ids, flow_run_id))


async def _create(client: PrefectClient, record: RunRecord, workspace: Workspace) -> str:
    """Create a flow run in its final state; returns its id."""
    reused = all(stage.status == "reused" for stage in record.stages.values())
    state = state_of(
        "reused" if reused and record.status == "completed" else record.status, run_message(record)
    )
    flow_run = await client.create_flow_run(
        pipeline,
        name=record.run_id,
        parameters={
            "recipe": record.source,
            "overrides": list(record.overrides),
            "workspace": workspace.address,
            "run_id": record.run_id,
            "strict": False,
        },
        tags=[f"recipe:{record.recipe.recipe}", f"run:{record.run_id}"],
    )
    await client.set_flow_run_state(flow_run.id, state, force=True)
    return str(flow_run.id)
