"""A real Prefect server shows how runs ended: cancelled there, failed, killed, or cut off from the server."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import WITH_PREFECT
from tests.support.orchestrated import events, pace
from tests.support.ports import own_port
from tests.support.real_runs import (
    Starter,
    configured_server,
    prefect_at,
    prefect_shows,
    run_recipe,
    wait_for,
)
from vantage.attempts.exit_codes import ExitCode
from vantage.flows.execution import exit_code
from vantage.flows.prefect_server.server import (
    OWN_SERVER,
    server_name,
)
from vantage.runs.record import OpenFlowRun, RunRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run, read_run, read_runs
from vantage.runs.workspace import Workspace
from vantage.tasks.training.scratch import read_committed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unsent")]


def state_of(flow_run_id: str) -> Any:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id).state  # type: ignore[arg-type]


def task_runs_of(flow_run_id: str) -> list[Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))  # type: ignore[list-item]
        return client.read_task_runs(flow_run_filter=chosen)


def messages_of(flow_run_id: str) -> dict[str, str]:
    """Return task run → the message of its state."""
    return {each.name: (each.state.message or "") if each.state else "" for each in task_runs_of(flow_run_id)}


def tags_of_tasks(flow_run_id: str) -> set[str]:
    return {tag for each in task_runs_of(flow_run_id) for tag in each.tags}


def cancel_by_command(flow_run_id: str) -> None:
    command = [sys.executable, "-m", "prefect", "flow-run", "cancel", flow_run_id]
    done = WITH_PREFECT.run(command, timeout=120)
    assert done.returncode == 0, done.stderr


def call_cancelled(flow_run_id: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Cancelled(), force=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("prefect_url")
@pytest.mark.parametrize("cancel", [cancel_by_command, call_cancelled])
def test_a_run_that_is_cancelled_in_prefect_saves_and_is_shown_as_cancelled(
    workspace: Workspace, recipe_file: Path, start_vantage: Starter, cancel: Any
) -> None:
    pace(workspace, 10.0)  # twelve steps: two minutes that nobody waits for
    process = start_vantage()
    wait_for(lambda: "sft started 1" in events(workspace))
    [flow_run_id] = read_runs(workspace)[0].prefect_flow_run_ids
    cancel(flow_run_id)
    printed, errors = process.communicate(timeout=100)
    assert process.returncode == ExitCode.RESUME, printed + errors
    assert "  cancelled\n" in printed
    [record] = read_runs(workspace)
    assert (record.status, record.stages["sft"].status) == ("resumable", "resumable")
    at_step, _ = read_committed(workspace.store / "scratch" / str(record.stages["sft"].stage_key))
    assert at_step > 0, "it has saved"
    flow_run, task_runs = prefect_shows(flow_run_id)
    assert flow_run.state_name == "Cancelled"
    assert task_runs["sft · attempt 1"] == "Cancelled"
    assert "sft resumable" in state_of(flow_run_id).message
    assert "stopped after step" in state_of(flow_run_id).message

    pace(workspace, 0.0)
    again, _ = run_recipe(workspace, recipe_file)
    assert (again.run_id, again.status) == (record.run_id, "completed")
    assert state_of(flow_run_id).name == "Cancelled", "what came to its end stays as it is"
    assert state_of(again.prefect_flow_run_ids[-1]).name == "Completed"
    assert again.open_flow_runs == ()


@pytest.mark.usefixtures("prefect_url")
def test_the_page_of_the_run_is_named_also_where_nothing_was_left_to_order(
    workspace: Workspace, recipe_file: Path, prefect_url: str
) -> None:
    def page_of(record: RunRecord) -> str:
        [flow_run_id] = record.prefect_flow_run_ids
        return f"{prefect_url.removesuffix('/api')}/runs/flow-run/{flow_run_id}"

    record, printed = run_recipe(workspace, recipe_file)
    page = page_of(record)
    assert f"Prefect shows it at {page}" in printed
    assert re.search(rf"^  Prefect +{re.escape(page)}$", printed, re.MULTILINE)

    closed, printed = run_recipe(workspace, recipe_file, "stages.reward.gate.at_least=0.99")
    assert (closed.status, exit_code(closed)) == ("gate_closed", ExitCode.GATE_CLOSED)
    assert closed.stages["policy"].status == "blocked"
    assert "Prefect shows it" not in printed, "the run had ended before Prefect had it"
    assert re.search(rf"^  Prefect +{re.escape(page_of(closed))}$", printed, re.MULTILINE)
    state = state_of(closed.prefect_flow_run_ids[0])
    assert (state.type, state.name) == ("FAILED", "GateClosed")
    assert "gate closed: pair_accuracy 0.8" in state.message, state.message


@pytest.mark.usefixtures("prefect_url")
def test_a_failed_run_says_why_and_is_found_by_its_recipe_and_by_itself(
    workspace: Workspace, recipe_file: Path
) -> None:
    workspace.root.mkdir()
    (workspace.root / "refuse.txt").write_text("policy")
    record, printed = run_recipe(workspace, recipe_file)
    [flow_run_id] = record.prefect_flow_run_ids
    flow_run, _ = prefect_shows(flow_run_id)
    why = "data.prompts: row 7 has no prompt; remove it; correct what the message names and run again"
    assert (flow_run.state_name, set(flow_run.tags)) == ("Failed", {"recipe:fake", f"run:{record.run_id}"})
    assert tags_of_tasks(flow_run_id) == set(), "each would cost a question to the server"
    lines = flow_run.state.message.splitlines()
    assert lines[0].startswith(f"policy failed: {why}")
    assert lines[0].endswith("; exit code 65")
    assert f"run {record.run_id} failed: {lines[0]}\n" in printed
    assert lines[1:] == ["not started: evaluation", "7 completed"]
    assert messages_of(flow_run_id)["policy · attempt 1"].startswith(why)

    (workspace.root / "refuse.txt").unlink()
    closed, _ = run_recipe(workspace, recipe_file, "stages.evaluation.gate.at_least=0.9")
    message = prefect_shows(closed.prefect_flow_run_ids[0])[0].state.message
    assert message.splitlines()[0] == "evaluation gate closed: accuracy_gain 0.100 >= 0.9: CLOSED"


@pytest.mark.usefixtures("prefect_url")
def test_the_next_run_of_any_recipe_closes_what_a_killed_one_left_open(
    workspace: Workspace, recipe_file: Path, start_vantage: Starter
) -> None:
    pace(workspace, 10.0)
    process = start_vantage()
    wait_for(lambda: "sft started 1" in events(workspace))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    [killed] = read_runs(workspace)
    [flow_run_id] = killed.prefect_flow_run_ids
    assert state_of(flow_run_id).name == "Running"

    pace(workspace, 0.0)
    run_recipe(workspace, recipe_file, "seed=5")
    flow_run, task_runs = prefect_shows(flow_run_id)
    assert (flow_run.state_name, task_runs["sft · attempt 1"]) == ("Crashed", "Crashed")
    assert "its process was killed" in flow_run.state.message
    assert read_run(workspace, killed.run_id).open_flow_runs == ()


def test_a_finished_run_is_recorded_when_its_server_is_back(
    workspace: Workspace,
    recipe_file: Path,
    start_vantage: Starter,
    tmp_path: Path,
) -> None:
    home, port = tmp_path / "home", own_port()
    pace(workspace, 0.05)
    url = f"http://127.0.0.1:{port}/api"
    with prefect_at(url, PREFECT_HOME=str(home), PREFECT_CLIENT_MAX_RETRIES="0"):
        with configured_server(home, port) as server:
            process = start_vantage()
            wait_for(lambda: "evaluation started 1" in events(workspace))
            server.kill()
            printed, errors = process.communicate(timeout=300)
        assert process.returncode == ExitCode.UNAVAILABLE
        [record] = read_runs(workspace)
        assert record.status == "completed"
        assert f"run {record.run_id} completed" in printed, "it says how the run ended"
        last = errors.rstrip().splitlines()[-1]
        assert last.startswith(f"vantage: the Prefect server at http://127.0.0.1:{port}")
        assert "the run has ended all the same (completed)" in last
        assert "Traceback" not in errors + printed
        [left] = record.open_flow_runs
        assert (left.flow_run_id, left.status) == (record.prefect_flow_run_ids[0], "completed")

        with configured_server(home, port):
            assert state_of(left.flow_run_id).name == "Running"
            again, _ = run_recipe(workspace, recipe_file)
            assert {stage.status for stage in again.stages.values()} == {"reused"}
            flow_run, task_runs = prefect_shows(left.flow_run_id)
        assert (flow_run.state_name, flow_run.state.message) == ("Completed", "9 completed")
        assert set(task_runs.values()) == {"Completed"}
    assert read_run(workspace, record.run_id).open_flow_runs == ()


def test_a_server_that_does_not_answer_holds_up_no_run_that_needs_none(
    workspace: Workspace,
    recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with prefect_at(None):
        record, _ = run_recipe(workspace, recipe_file)  # on a server of its own
    assert record.open_flow_runs == ()
    url = f"http://127.0.0.1:{own_port()}/api"
    monkeypatch.setattr("vantage.flows.prefect_server.server.ANSWER_SECONDS", 1.0)
    with prefect_at(url):
        assert server_name(workspace.root) == url != OWN_SERVER
        left = OpenFlowRun(flow_run_id="0" * 32, server=url, status="completed", message="9 completed")
        with acquire_run(workspace, load_resolved(recipe_file)[0], source="a") as run:
            run.update(status="completed", open_flow_runs=(left,))
        again, _ = run_recipe(workspace, recipe_file)
    assert again.status == "completed"
    assert read_run(workspace, run.record.run_id).open_flow_runs == (left,), "the next run tries again"
