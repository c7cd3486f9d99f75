"""A deployed pipeline that waits for a person is suspended in a real Prefect server, and its form resumes it."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.support.fork_server import WITH_PREFECT
from tests.support.orchestrated import events
from vantage.flows.prefect_server.flow_runs import close_open_flow_runs
from vantage.flows.prefect_server.server import server_name
from vantage.runs.approving import answer
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run, read_runs
from vantage.runs.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("unsent")]

ROOT = Path(__file__).parents[2]
GATE = ["stages.sft.gate.at_most=0.1", "stages.sft.gate.on_fail=approve"]
RECIPE = """\
recipe: formed
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
  preferences: {source: "builtin:arithmetic/preferences"}
stages:
  sft: {kind: sft, data: demonstrations, gate: {metric: test_nll, at_most: 1.0}}
  reward: {kind: reward_model, init: sft, data: preferences}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """Return a recipe with a gate between two stages."""
    path = tmp_path / "formed.yaml"
    path.write_text(RECIPE)
    return path


def created(recipe: Path, workspace: Workspace) -> str:
    """Return a flow run of a deployment, as a worker finds it."""
    from prefect.client.orchestration import get_client
    from prefect.utilities.callables import parameter_schema

    from vantage.flows.pipeline import pipeline

    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(
            client.create_flow(pipeline),
            "with a form",
            entrypoint="tests.support.fake_models_flow.pipeline",
            path=str(ROOT),
            parameter_openapi_schema=parameter_schema(pipeline).model_dump(),
            enforce_parameter_schema=True,
        )
        parameters = {"recipe": str(recipe), "overrides": GATE, "workspace": str(workspace.root)}
        return str(client.create_flow_run_from_deployment(deployment, parameters=parameters).id)


def engine(flow_run_id: str) -> None:
    """Run a scheduled flow run as a process worker starts it."""
    done = WITH_PREFECT.run(
        [sys.executable, "-m", "prefect.engine", flow_run_id],
        env={**os.environ, "PREFECT__FLOW_RUN_ID": flow_run_id, "PYTHONPATH": str(ROOT)},
        timeout=600,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    print(done.stdout, done.stderr)


def state_of(flow_run_id: str) -> tuple[str | None, str | None]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(flow_run_id)).state
    assert state is not None
    return state.name, state.message


def send_form(flow_run_id: str, **given: str) -> Any:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.resume_flow_run(UUID(flow_run_id), run_input=given)


@pytest.mark.usefixtures("prefect_url")
def test_it_is_suspended_and_goes_on_when_the_form_is_sent(workspace: Workspace, recipe_file: Path) -> None:
    flow_run_id = created(recipe_file, workspace)
    engine(flow_run_id)
    assert state_of(flow_run_id)[0] == "Suspended"
    [record] = read_runs(workspace)
    assert (record.status, list(record.open_questions)) == ("waiting_approval", ["sft"])

    recipe, _ = load_resolved(recipe_file, ["seed=9"])
    with acquire_run(workspace, recipe, source="another") as other:
        asyncio.run(close_open_flow_runs(other, server=server_name(workspace.root)))
    assert state_of(flow_run_id)[0] == "Suspended", "nobody closes a flow run that waits for a person"
    computed = len(events(workspace))

    refused = send_form(flow_run_id, decision="approve", name="ada")
    assert refused.status.value == "REJECT", "a reason is required"
    refused = send_form(flow_run_id, decision="perhaps", name="ada", reason="x")
    assert refused.status.value == "REJECT"
    assert (
        send_form(flow_run_id, decision="approve", name="ada", reason="good enough").status.value == "ACCEPT"
    )
    engine(flow_run_id)
    assert state_of(flow_run_id)[0] == "Completed", state_of(flow_run_id)
    done = next(each for each in read_runs(workspace) if each.run_id == record.run_id)
    [given] = done.approvals
    assert (given.by, given.login, given.reason, given.approved) == ("ada", None, "good enough", True)
    assert (done.status, done.stages["reward"].status) == ("completed", "completed")
    assert done.prefect_flow_run_ids == (flow_run_id,)
    assert len(events(workspace)) == computed + 2, "reward was started and finished; nothing is made twice"


@pytest.mark.usefixtures("prefect_url")
def test_rejected_in_the_form_or_approved_of_on_the_command_line(
    workspace: Workspace, recipe_file: Path
) -> None:
    first = created(recipe_file, workspace)
    engine(first)
    send_form(first, decision="reject", name="ada", reason="too low")
    engine(first)
    name, message = state_of(first)
    assert (name, "test_nll" in str(message)) == ("GateClosed", True)
    assert read_runs(workspace)[0].status == "gate_closed"

    second = created(recipe_file, workspace)
    engine(second)
    newest = read_runs(workspace)[0]
    assert (newest.number, newest.status) == (2, "waiting_approval")
    answer(workspace, newest.run_id, "sft", approved=True, by="bob", reason="good enough")
    # The form resumes it nevertheless, and the first answer counts.
    send_form(second, decision="reject", name="ada", reason="too low")
    engine(second)
    assert state_of(second)[0] == "Completed"
    newest = read_runs(workspace)[0]
    assert [each.by for each in newest.approvals] == ["bob"]
