"""Prefect's own API starts the flow with nothing but JSON, as its run form, a deployment or a schedule would."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events import Event
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter

from tests.support.fork_server import WITH_PREFECT
from tests.support.orchestrated import events, pace
from tests.support.real_runs import prefect_shows, wait_for
from vantage.attempts.stopping import DRAIN_FILE
from vantage.flows.prefect_server import flow_runs
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.usefixtures("unsent")

ROOT = Path(__file__).parents[2]

Start = Callable[..., str]


@pytest.fixture
def start(prefect_url: str) -> Start:
    """Create a flow run of a deployment with these parameters, have Prefect's engine run it; returns its id."""

    def run(parameters: dict[str, Any], by_schedule: bool = False) -> str:
        from prefect.client.orchestration import get_client
        from prefect.utilities.callables import parameter_schema

        from vantage.flows.pipeline import pipeline

        with get_client(sync_client=True) as client:
            deployment = client.create_deployment(
                client.create_flow(pipeline),
                "from the form",
                entrypoint="tests.support.fake_flow.pipeline",
                path=str(ROOT),
                parameter_openapi_schema=parameter_schema(pipeline).model_dump(),
                enforce_parameter_schema=True,
            )
            flow_run_id: UUID
            if by_schedule:
                flow_run_id = scheduled_flow_run(client, deployment, parameters)
            else:
                flow_run_id = client.create_flow_run_from_deployment(deployment, parameters=parameters).id
        environment = {
            **os.environ,
            "PREFECT__FLOW_RUN_ID": str(flow_run_id),
            "PYTHONPATH": str(ROOT),
        }
        done = WITH_PREFECT.run(
            [sys.executable, "-m", "prefect.engine", str(flow_run_id)],
            env=environment,
            timeout=200,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return str(flow_run_id)

    return run


def scheduled_flow_run(client: SyncPrefectClient, deployment: UUID, parameters: dict[str, Any]) -> UUID:
    """Return a flow run that Prefect's scheduler makes of a schedule."""
    client.update_deployment(deployment, DeploymentUpdate(parameters=parameters))
    client.create_deployment_schedules(deployment, [(IntervalSchedule(interval=timedelta(seconds=1)), True)])
    client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json={"max_runs": 1})
    of_ours = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
    [flow_run] = [run for run in client.read_flow_runs(deployment_filter=of_ours) if run.auto_scheduled]
    return flow_run.id


@pytest.mark.slow
def test_one_that_a_schedule_made_tells_the_event_that_the_scheduler_leaves_out(
    workspace: Workspace, recipe_file: Path, start: Start
) -> None:
    """The event has the id of the run's first state, which the next state's event names as the one before."""
    named = EventFilter(event=EventNameFilter(name=["prefect.flow-run.Scheduled"]))
    found: list[Event] = []

    async def listen(ended: Callable[[], bool]) -> None:
        async with get_events_subscriber(filter=named) as subscriber:
            listening.set()
            while not (found or ended()):
                with suppress(TimeoutError):
                    found.append(await asyncio.wait_for(anext(subscriber), 1.0))

    listening, done = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        listener = thread.submit(asyncio.run, listen(done.is_set))
        assert listening.wait(30)
        parameters = {"recipe": str(recipe_file), "workspace": str(workspace.root)}
        flow_run_id = start(parameters, by_schedule=True)
        done.set()
        listener.result()
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(flow_run_id))
    assert {event.id for event in found} == {min(states, key=lambda state: state.timestamp).id}
    assert found[0].resource.id == f"prefect.flow-run.{flow_run_id}"


def test_a_server_that_fails_then_costs_the_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise ConnectionError("connection refused")

    told: list[object] = []
    monkeypatch.setattr(flow_runs, "get_client", refused)
    monkeypatch.setattr(flow_runs, "emit_event", told.append)
    asyncio.run(flow_runs.tell_that_it_was_scheduled(str(UUID(int=1))))
    assert told == [], "nothing is known of the flow run"


@pytest.mark.slow
def test_a_recipe_by_name_of_its_file(workspace: Workspace, recipe_file: Path, start: Start) -> None:
    overrides = ["stages.value.gate.at_least=0.2"]
    flow_run_id = start(
        {"recipe": str(recipe_file), "overrides": overrides, "workspace": str(workspace.root)}
    )
    [record] = read_runs(workspace)
    assert (record.status, record.source, record.overrides) == ("completed", str(recipe_file), (*overrides,))
    assert record.prefect_flow_run_ids == (flow_run_id,)
    # Prefect records the end after the flow has returned: the next run in the workspace finds it recorded.
    assert [(each.flow_run_id, each.status) for each in record.open_flow_runs] == [(flow_run_id, "completed")]
    flow_run, task_runs = prefect_shows(flow_run_id)
    assert (flow_run.name, flow_run.state_name) == (record.run_id, "Completed")
    assert set(flow_run.tags) == {"recipe:fake", f"run:{record.run_id}"}
    assert task_runs == {f"{step} · attempt 1": "Completed" for step in record.stages}


@pytest.mark.slow
def test_a_recipe_as_a_text_and_then_its_run_by_id(
    workspace: Workspace, recipe_file: Path, start: Start
) -> None:
    text = recipe_file.read_text().replace("seed: 17", "seed: 23")
    (workspace.root).mkdir()
    (workspace.root / "refuse.txt").write_text("policy")
    first = start({"recipe": text, "workspace": str(workspace.root)})
    [record] = read_runs(workspace)
    assert (record.status, record.recipe.seed) == ("failed", 23)
    flow_run, _ = prefect_shows(first)
    assert flow_run.state_name == "Failed"
    assert "row 7 has no prompt" in flow_run.state.message

    (workspace.root / "refuse.txt").unlink()
    again = start({"recipe": "fake", "workspace": str(workspace.root), "run_id": record.run_id})
    [record] = read_runs(workspace)
    assert record.status == "completed"
    assert record.prefect_flow_run_ids == (first, again)
    assert [each.flow_run_id for each in record.open_flow_runs] == [again]
    assert sum(line.startswith("sft started") for line in events(workspace)) == 1


@pytest.mark.slow
def test_a_worker_that_ends_leaves_a_crashed_flow_run_for_another_to_go_on_with(
    workspace: Workspace, recipe_file: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DRAIN_FILE, str(tmp_path / "drain"))
    pace(workspace, 0.5)
    parameters = {"recipe": str(recipe_file), "workspace": str(workspace.root)}
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(start, parameters)
        wait_for(
            lambda: running.done() or any("sft started" in line for line in events(workspace)), seconds=100
        )
        (tmp_path / "drain").touch()
        flow_run_id = running.result()
    [record] = read_runs(workspace)
    assert (record.status, record.stages["sft"].status) == ("resumable", "resumable")
    flow_run, _ = prefect_shows(flow_run_id)
    assert (flow_run.state_name, flow_run.state.type.value) == ("Crashed", "CRASHED")
    assert "its worker was asked to end" in flow_run.state.message

    (tmp_path / "drain").unlink()
    pace(workspace, 0.0)
    start(parameters)
    [record] = read_runs(workspace)
    assert (record.status, record.stages["sft"].attempt) == ("completed", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"recipe": "quickstrat"}, "is neither a file nor a built-in recipe"),
        ({"recipe": "recipe: x\nstages: {a: {kind: sfft}}\n"}, "'sfft'"),
        ({"recipe": "quickstart", "run_id": "0007-fake-abcdef"}, "there is no run 0007-fake-abcdef"),
    ],
)
def test_what_is_refused_is_told_in_the_state(
    workspace: Workspace, start: Start, parameters: dict[str, str], message: str
) -> None:
    flow_run_id = start({**parameters, "workspace": str(workspace.root)})
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(flow_run_id)).state
    assert state is not None
    assert (state.name, message in str(state.message)) == ("Failed", True), state.message


def test_the_form_asks_for_plain_values() -> None:
    from prefect.utilities.callables import parameter_schema

    from vantage.flows.pipeline import pipeline

    schema = parameter_schema(pipeline)
    assert schema.required == ["recipe"]
    types = {name: each.get("type") or [any_of["type"] for any_of in each["anyOf"]]
             for name, each in schema.properties.items()}  # fmt: skip
    assert types == {
        "recipe": "string",
        "overrides": ["array", "null"],
        "workspace": "string",
        "run_id": ["string", "null"],
        "strict": "boolean",
        "seed": ["integer", "null"],
        "restarts": "integer",
    }
    assert all(each.get("description") for each in schema.properties.values())
