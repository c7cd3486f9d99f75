"""A real Prefect server (one for the module) orders runs of fake stages in real child processes."""

import json
import os
import signal
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from tests.support.orchestrated import events, pace
from tests.support.processes import with_word
from tests.support.real_runs import (
    Starter,
    prefect_at,
    prefect_shows,
    run_recipe,
    wait_for,
)
from vantage.attempts.exit_codes import ExitCode
from vantage.flows.execution import exit_code
from vantage.flows.prefect_server.server import prefect_server
from vantage.runs.run import read_runs
from vantage.runs.status import run_state
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.slow

CANARY = "hf_canary_that_nobody_writes_down"


def pages(flow_run_id: str) -> dict[str, str]:
    """Return Prefect's artifacts of a flow run: key → data."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run_id)]))
        found = client.read_artifacts(flow_run_filter=chosen)
        return {artifact.key: str(artifact.data) for artifact in found if artifact.key}


@pytest.mark.usefixtures("prefect_url")
def test_a_recipe_runs_once_and_is_then_only_verified(
    workspace: Workspace,
    recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    record, printed = run_recipe(workspace, recipe_file)
    assert record.status == "completed", printed
    assert exit_code(record) == ExitCode.OK
    assert {stage.status for stage in record.stages.values()} == {"completed"}
    assert "gate explained_variance 0.400 >= 0.3: passed" in printed
    assert "1+1?" in printed
    assert record.mlflow_run_id is not None

    flow_run, task_runs = prefect_shows(record.prefect_flow_run_ids[0])
    assert (flow_run.name, flow_run.state_name) == (record.run_id, "Completed")
    assert flow_run.parameters == {
        "recipe": str(recipe_file),
        "overrides": [],
        "workspace": str(workspace.root),
        "run_id": record.run_id,
        "strict": False,
        "seed": None,
        "restarts": 0,
    }
    assert set(flow_run.tags) == {"recipe:fake", f"run:{record.run_id}"}
    assert task_runs == {f"{step} · attempt 1": "Completed" for step in record.stages}
    assert '"metric": "pair_accuracy"' in pages(record.prefect_flow_run_ids[0])["gates"]
    assert not list(Path(os.environ["PREFECT_HOME"]).glob("storage/**/*")), (
        "Prefect keeps no result, so no pickle"
    )
    written = [path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()]
    assert CANARY not in printed
    assert not any(CANARY.encode() in content for content in written), (
        "what the environment holds stays there"
    )

    again, printed = run_recipe(workspace, recipe_file)
    assert again.run_id != record.run_id
    assert {stage.status for stage in again.stages.values()} == {"reused"}
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        shown = client.read_flow_run(UUID(again.prefect_flow_run_ids[0]))
    assert (shown.name, shown.state_name) == (again.run_id, "Reused")
    assert len(events(workspace)) == 18


MIXED = """\
recipe: fake
model: {source: "builtin:tiny"}
data:
  a: {source: "builtin:arithmetic/demonstrations"}
  b: {source: "builtin:arithmetic_long/demonstrations"}
mixtures:
  both: {parts: {a: 0.7, b: 0.3}}
stages:
  sft: {kind: sft, data: both}
"""


@pytest.mark.usefixtures("prefect_url", "unsent")
def test_a_mixture_is_made_between_its_parts_and_its_stage(workspace: Workspace, tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(MIXED)
    record, printed = run_recipe(workspace, recipe)
    assert record.status == "completed", printed
    stages = record.stages
    assert list(stages) == ["model", "data.a", "data.b", "mixtures.both", "sft"]
    mixture, sft = stages["mixtures.both"], stages["sft"]
    parts = {"part.0": stages["data.a"].digest, "part.1": stages["data.b"].digest}
    assert mixture.key_parts["inputs"] == parts and None not in parts.values()
    assert mixture.key_parts["configuration"]["weights"] == [0.7, 0.3]
    assert sft.key_parts["inputs"]["data"] == mixture.digest

    renamed = tmp_path / "renamed.yaml"
    renamed.write_text(MIXED.replace("both", "blend").replace("a: 0.7", "a: 7").replace("b: 0.3", "b: 3"))
    again, _ = run_recipe(workspace, renamed)
    assert {stage.status for stage in again.stages.values()} == {"reused"}, "names are in no key"


@pytest.mark.usefixtures("prefect_url", "unsent")
def test_a_closed_gate_stops_what_depends_on_it_and_nothing_else(
    workspace: Workspace, recipe_file: Path
) -> None:
    recipe = recipe_file.read_text() + "  other: {kind: sft, data: demonstrations, seed: 3}\n"
    recipe += "publish: [{stage: policy, registered_model: fake, alias: best, after: evaluation}]\n"
    recipe_file.write_text(recipe)
    record, printed = run_recipe(workspace, recipe_file, "stages.value.gate.at_least=0.9")
    assert record.status == "gate_closed"
    assert exit_code(record) == ExitCode.GATE_CLOSED
    statuses = {name: stage.status for name, stage in record.stages.items()}
    assert statuses["value"] == "gate_closed"
    assert statuses["policy"] == statuses["evaluation"] == "blocked"
    assert statuses["other"] == "completed"
    assert "policy is not published as fake: policy is blocked" in printed

    flow_run, task_runs = prefect_shows(record.prefect_flow_run_ids[0])
    assert flow_run.state_name == "GateClosed"
    assert task_runs["value · attempt 1"] == "GateClosed"
    assert not any(name.startswith(("policy", "evaluation")) for name in task_runs)


@pytest.mark.usefixtures("prefect_url", "unsent")
def test_a_lost_process_is_begun_again_and_a_refusal_is_not(workspace: Workspace, recipe_file: Path) -> None:
    workspace.root.mkdir()
    (workspace.root / "lose.txt").write_text("sft")
    record, printed = run_recipe(workspace, recipe_file)
    [lost] = [line for line in printed.splitlines() if line.startswith("  … sft")]
    assert "was killed from outside; attempt 2 begins anew (" in lost
    assert "run the same command again" not in printed, "it goes on by itself"
    assert record.status == "completed"
    assert record.stages["sft"].attempt == 2
    _, task_runs = prefect_shows(record.prefect_flow_run_ids[0])
    assert task_runs["sft · attempt 1"] == "Resumable"
    assert task_runs["sft · attempt 2"] == "Completed"

    (workspace.root / "refuse.txt").write_text("policy")
    record, printed = run_recipe(workspace, recipe_file, "stages.policy.epochs=2")
    assert (record.status, exit_code(record)) == ("failed", ExitCode.BAD_INPUT)
    assert record.stages["policy"].attempt == 1
    assert record.stages["evaluation"].status == "blocked"
    assert "row 7 has no prompt" in printed


@pytest.mark.usefixtures("prefect_url", "unsent")
def test_a_lack_of_memory_and_a_hang_are_survived_once_and_told_in_a_line_each(
    workspace: Workspace, recipe_file: Path
) -> None:
    workspace.root.mkdir()
    (workspace.root / "memory.txt").write_text("sft 32")
    (workspace.root / "hang.txt").write_text("reward 1\npolicy 2")
    record, printed = run_recipe(
        workspace,
        recipe_file,
        "stages.reward.resources.hang_seconds=5",
        "stages.policy.resources.hang_seconds=5",
    )
    lines = printed.splitlines()
    log = workspace.folder(record.run_id) / "logs"
    [memory] = [line for line in lines if "CUDA out of memory" in line]
    assert memory.split()[:3] == ["…", "sft", "resumable"]
    assert memory.endswith(
        f"attempt 2 goes on from step 4 with passes of at most 320 positions in place of 640 ({log / 'sft.log'})"
    )
    [hang] = [line for line in lines if "no progress" in line and " reward " in line]
    assert hang.endswith(f"attempt 2 goes on from step 4 ({log / 'reward.log'})")
    statuses = {name: (stage.status, stage.attempt) for name, stage in record.stages.items()}
    assert statuses["sft"] == statuses["reward"] == ("completed", 2)
    assert statuses["policy"] == ("failed", 2)
    assert (record.status, exit_code(record)) == ("failed", ExitCode.HUNG)
    assert "raise its resources.hang_seconds" in printed
    _, task_runs = prefect_shows(record.prefect_flow_run_ids[0])
    for stage in ("sft", "reward"):
        assert (task_runs[f"{stage} · attempt 1"], task_runs[f"{stage} · attempt 2"]) == (
            "Resumable",
            "Completed",
        )
    assert task_runs["policy · attempt 2"] == "Failed"


@pytest.mark.usefixtures("prefect_url", "unsent")
def test_killed_in_the_middle_of_a_stage_the_same_command_goes_on(
    workspace: Workspace, recipe_file: Path, tmp_path: Path, start_vantage: Starter
) -> None:
    whole = Workspace(tmp_path / "whole")
    expected, _ = run_recipe(whole, recipe_file)

    pace(workspace, 0.3)
    process = start_vantage()
    wait_for(lambda: "policy started 1" in events(workspace))
    key = read_runs(workspace)[0].stages["policy"].stage_key
    wait_for((workspace.store / "scratch" / str(key) / "committed.json").exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    [record] = read_runs(workspace)
    view = run_state(workspace, record)
    assert (view.status, view.status_of("policy")) == ("interrupted", "interrupted")

    pace(workspace, 0.0)
    done = start_vantage("--json")
    printed, _ = done.communicate(timeout=300)
    summary = json.loads(printed.splitlines()[-1])
    assert done.returncode == 0
    assert summary["run_id"] == record.run_id
    assert summary["status"] == "completed"
    stages = summary["stages"]
    assert {name: stage["digest"] for name, stage in stages.items()} == {
        name: stage.digest for name, stage in expected.stages.items()
    }
    assert set(stages["policy"]) == {"status", "stage_key", "digest", "metrics"}
    assert [name for name, stage in stages.items() if stage["status"] != "reused"] == ["policy", "evaluation"]
    assert [line for line in events(workspace) if line.startswith("policy")] == [
        "policy started 1",
        "policy started 2",
        "policy finished 2",
    ]

    first, second = read_runs(workspace)[0].prefect_flow_run_ids
    assert prefect_shows(first)[0].state_name == "Crashed"
    assert prefect_shows(second)[1]["policy · attempt 2"] == "Completed"


@pytest.mark.usefixtures("prefect_url", "unsent")
def test_asked_to_stop_a_run_saves_and_says_how_to_go_on(
    workspace: Workspace, recipe_file: Path, start_vantage: Starter
) -> None:
    pace(workspace, 0.2)
    process = start_vantage()
    wait_for(lambda: "sft started 1" in events(workspace))
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == ExitCode.RESUME
    assert "run the same command again" in printed
    assert "Traceback" not in errors
    [record] = read_runs(workspace)
    assert (record.status, record.stages["sft"].status) == ("resumable", "resumable")
    assert record.stages["reward"].reason == "the run was stopped"

    pace(workspace, 0.0)
    record, _ = run_recipe(workspace, recipe_file)
    assert record.status == "completed"
    assert record.stages["sft"].attempt == 2


@pytest.mark.usefixtures("prefect_url", "unsent")
def test_the_same_recipe_started_twice_at_once_trains_once(
    workspace: Workspace, recipe_file: Path, start_vantage: Starter
) -> None:
    pace(workspace, 0.8)
    other = start_vantage()
    wait_for(lambda: "sft started 1" in events(workspace))
    pace(workspace, 0.0)  # sft alone takes ten seconds, within which the second run comes to wait for it
    record, printed = run_recipe(workspace, recipe_file)
    other.communicate(timeout=300)
    assert other.returncode == 0
    assert record.status == "completed"
    assert "waits for run" in printed
    started = [line for line in events(workspace) if " started " in line]
    assert len(started) == len(set(started)) == 9
    first, second = read_runs(workspace)
    assert {name: stage.digest for name, stage in first.stages.items()} == {
        name: stage.digest for name, stage in second.stages.items()
    }


@pytest.mark.usefixtures("prefect_url", "unsent")
def test_a_broken_verifier_is_one_message_and_nothing_trains(
    workspace: Workspace, recipe_file: Path, start_vantage: Starter
) -> None:
    recipe_file.with_name("mine.py").write_text("def verify(prompt, response, answer)\n    return True\n")
    recipe = recipe_file.read_text().replace(
        "rewards:\n", "verifiers: {mine: {source: mine.py}}\nrewards:\n", 1
    )
    recipe_file.write_text(recipe.replace("judge: {verifier: arithmetic}", "judge: {verifier: mine}"))
    process = start_vantage()
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == ExitCode.BAD_INPUT, printed + errors
    told = " ".join((printed + errors).split())
    message = (
        "verifiers.mine.source: the file is not Python (line 1: expected ':'); correct what the message names"
    )
    lines = [line.split()[0] for line in (printed + errors).splitlines() if message in line]
    assert lines == ["✗", "run"], "when it fails, and as the reason of the run"
    assert "Traceback" not in told
    [record] = read_runs(workspace)
    statuses = {name: stage.status for name, stage in record.stages.items()}
    assert statuses["verifiers.mine"] == "failed"
    assert {statuses[name] for name in record.recipe.stages} == {"blocked"}
    assert record.stages["sft"].reason == "waits for verifiers.mine, which is failed"


def test_settings_that_prefect_refuses_leave_a_run_to_go_on_with(
    workspace: Workspace, start_vantage: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "many")
    process = start_vantage()
    _, errors = process.communicate(timeout=300)
    assert process.returncode not in (ExitCode.OK, ExitCode.INTERNAL)
    assert "max_retries" in errors and "Traceback" not in errors
    [record] = read_runs(workspace)
    assert record.status == "resumable"
    assert {stage.status for stage in record.stages.values()} == {"waiting"}


@pytest.mark.usefixtures("prefect_url", "unsent")
def test_a_prefect_server_that_is_killed_midway_is_told_and_no_finished_stage_is_made_again(
    workspace: Workspace,
    recipe_file: Path,
    start_vantage: Starter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pace(workspace, 0.1)
    with monkeypatch.context() as patch:
        patch.delenv("PREFECT_API_URL")  # it starts a server of its own
        patch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")  # the run gives the server up at once
        process = start_vantage(imports=True)
    wait_for(lambda: "reward started 1" in events(workspace))
    [server] = [
        child
        for child in with_word(
            psutil.Process(process.pid).children(), "vantage.flows.prefect_server.tied_process"
        )
        if "uvicorn" in child.cmdline()
    ]
    server.kill()
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == ExitCode.OK, "another server of its own was told, once, how the run ended"
    assert "the Prefect server stopped answering, and now knows how the run ended" in printed
    assert "Traceback" not in errors + printed
    [done] = read_runs(workspace)
    with prefect_at(None), prefect_server(workspace.root):
        flow_run, task_runs = prefect_shows(done.prefect_flow_run_ids[0])
    assert (done.open_flow_runs, flow_run.state_name) == ((), "Completed")
    assert set(task_runs.values()) == {"Completed"}

    pace(workspace, 0.0)
    record, _ = run_recipe(workspace, recipe_file)
    assert record.status == "completed"
    made = [line for line in events(workspace) if " finished " in line]
    assert len(made) == len(record.stages), "every stage was made once"
