"""The quickstart runs end to end at reduced size, through the command line, also when it is killed.

The first run is the command that a user has; the others are forks of a process that has imported what it imports.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import WITH_BOTH
from tests.support.real_runs import FORKED_VANTAGE, environment_of_forks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REDUCED = {
    "seed": 3,
    "generation.max_response_tokens": 20,
    "data.demonstrations.rows": 240,
    "data.preferences.rows": 240,
    "data.preferences.max_dropped": 0.5,  # at 20 tokens the two sides of many pairs are cut to the same
    "data.prompts.rows": 100,
    "data.prompts.split": "{validation: 16, test: 16}",
    "stages.sft.epochs": 0.5,
    "stages.sft.batch_size": 8,
    "stages.sft.checkpoint_every": 3,
    "stages.reward.epochs": 0.25,
    "stages.reward.batch_size": 4,
    "stages.reward.checkpoint_every": 3,
    "stages.reward.gate.at_least": 0.0,
    "stages.value.iterations": 6,
    "stages.value.batch_size": 16,
    "stages.value.minibatch_size": 8,
    "stages.value.validate_every": 2,
    "stages.value.validation_samples": 16,
    "stages.value.checkpoint_every": 1,
    "stages.value.gate.at_least": -1000,
    "stages.policy.iterations": 6,
    "stages.policy.learning_rate": 1e-3,
    "stages.policy.batch_size": 16,
    "stages.policy.minibatch_size": 8,
    "stages.policy.validate_every": 3,
    "stages.policy.validation_samples": 16,
    "stages.policy.checkpoint_every": 1,
    "stages.policy.algorithm.samples_per_prompt": 4,
    "stages.evaluation.samples_per_prompt": 1,
    "stages.evaluation.gate.at_least": -1,
}
"""Overrides that make each stage a matter of seconds. Gates are set so that they pass: nothing is learnt here."""

STAGES = ("sft", "reward", "value", "policy", "evaluation")
STEPS = ("model", "data.demonstrations", "data.preferences", "data.prompts", *STAGES)
BEFORE = {"sft": STEPS[:4], "value": STEPS[:6], "policy": STEPS[:7]}
"""What has ended before a stage begins. ``reward`` runs beside ``sft``."""


def command(workspace: Path, **overrides: Any) -> list[str]:
    """Return what follows ``vantage`` in the command that runs the quickstart."""
    merged = {**REDUCED, **{name.replace("__", "."): value for name, value in overrides.items()}}
    sets = [part for name, value in merged.items() for part in ("--set", f"{name}={value}")]
    return ["run", "quickstart", "--json", "--workspace", str(workspace), *sets]


def run(workspace: Path, **overrides: Any) -> tuple[int, dict[str, Any]]:
    """Run ``vantage run quickstart --json``, and return the exit code and the content of the last line."""
    words = command(workspace, **overrides)
    return ended(
        WITH_BOTH.run(
            [*FORKED_VANTAGE, *words], timeout=600, cwd=workspace.parent, env=environment_of_forks()
        )
    )


def ended(done: subprocess.CompletedProcess[str]) -> tuple[int, dict[str, Any]]:
    """Return the exit code of a run and the content of its last line."""
    assert done.stdout.strip(), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.strip().splitlines()[-1])


def reasons(workspace: Path) -> dict[str, str]:
    """Return why each stage of the newest run has failed, as far as one has."""
    record = json.loads(max((workspace / "runs").glob("*/run.json")).read_text())
    return {name: stage["reason"] for name, stage in record["stages"].items() if stage["reason"]}


def digests(report: dict[str, Any]) -> dict[str, str]:
    return {name: stage["digest"] for name, stage in report["stages"].items()}


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {name: stage["status"] for name, stage in report["stages"].items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a workspace in which the reduced quickstart has run through, and what it reported."""
    workspace = tmp_path_factory.mktemp("finished") / "workspace"
    vantage = Path(sys.executable).with_name("vantage")
    first = [str(vantage), *command(workspace)]
    code, report = ended(subprocess.run(first, capture_output=True, text=True, cwd=workspace.parent))
    assert code == 0, reasons(workspace)
    return workspace, report


def test_it_runs_through_from_nothing(finished: tuple[Path, dict[str, Any]]) -> None:
    """The reduced quickstart runs from an empty workspace to its end."""
    _, report = finished
    assert report["status"] == "completed"
    assert statuses(report) == dict.fromkeys(STEPS, "completed")
    assert all(len(stage["stage_key"]) == len(stage["digest"]) == 64 for stage in report["stages"].values())
    assert {"accuracy", "accuracy_gain"} <= report["stages"]["evaluation"]["metrics"].keys()
    assert "explained_variance" in report["stages"]["value"]["metrics"]


def test_the_second_run_trains_nothing(finished: tuple[Path, dict[str, Any]]) -> None:
    workspace, first = finished
    code, second = run(workspace)
    assert code == 0
    assert statuses(second) == dict.fromkeys(STEPS, "reused")
    assert digests(second) == digests(first)
    assert second["run_id"] != first["run_id"]


def test_one_switch_of_the_policy_runs_two_stages(finished: tuple[Path, dict[str, Any]]) -> None:
    workspace, _ = finished
    code, report = run(workspace, stages__policy__algorithm__positive_nll_coef=0.5)
    assert code == 0
    ran = {name for name, status in statuses(report).items() if status == "completed"}
    assert ran == {"policy", "evaluation"}


def test_a_tightened_gate_judges_again_and_trains_nothing(finished: tuple[Path, dict[str, Any]]) -> None:
    workspace, first = finished
    code, report = run(workspace, stages__value__gate__at_least=0.999)
    assert code == 78
    after = statuses(report)
    assert after["value"] == "gate_closed"
    assert after["policy"] == after["evaluation"] == "blocked"
    assert report["stages"]["value"]["digest"] == first["stages"]["value"]["digest"]


def test_a_closed_gate_is_recorded_with_its_evidence_and_stops_the_policy(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    workspace, _ = finished
    code, report = run(workspace, stages__value__gate__at_least=0.999, stages__value__iterations=2)
    assert code == 78
    assert statuses(report)["value"] == "gate_closed"
    assert statuses(report)["policy"] == "blocked"
    record = json.loads((workspace / "runs" / report["run_id"] / "run.json").read_text())
    (verdict,) = record["stages"]["value"]["verdicts"]
    assert not verdict["passed"]
    assert {"return_variance", "value_bias", "value_mse"} <= verdict["evidence"].keys()
    assert record["stages"]["policy"]["digest"] is None


def test_killed_in_the_middle_of_three_stages_it_goes_on_and_ends_with_the_same_bits(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """One run is killed in three of its stages in turn. No kill costs a stage that was finished before it."""
    _, whole = finished
    workspace = tmp_path / "workspace"
    for stage in ("sft", "value", "policy"):
        kill_in_the_middle_of(stage, workspace)
        [record] = (json.loads(path.read_text()) for path in workspace.glob("runs/*/run.json"))
        before = {name: record["stages"][name]["digest"] for name in BEFORE[stage]}
        assert before == {name: digests(whole)[name] for name in before}
        assert record["stages"][stage]["digest"] is None, "it was in the middle of it"
    code, report = run(workspace)
    assert code == 0, report
    assert digests(report) == digests(whole)
    ran = {name for name, status in statuses(report).items() if status != "reused"}
    assert ran == {"policy", "evaluation"}, "the rest was finished before the last kill"
    for name, stage in json.loads(next(workspace.glob("runs/*/run.json")).read_text())["stages"].items():
        most = 2 if name in ("sft", "reward", "value", "policy") else 1
        # The first kill found the reward model running beside sft, or at its end, or not begun.
        least = 1 if name == "reward" else most
        assert least <= stage["attempt"] <= most, name


def kill_in_the_middle_of(stage: str, workspace: Path) -> None:
    """Run, or go on with, the quickstart until the stage has saved a checkpoint, then end all its processes."""
    victim = WITH_BOTH.popen(
        [*FORKED_VANTAGE, *command(workspace)],
        env=environment_of_forks(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=workspace.parent,
        start_new_session=True,
    )
    try:
        wait_for_a_checkpoint_of(stage, workspace, victim)
    finally:
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()


def wait_for_a_checkpoint_of(stage: str, workspace: Path, running: subprocess.Popen[bytes]) -> None:
    """Wait until the stage has saved a checkpoint and goes on."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert running.poll() is None, f"the run ended before a checkpoint of {stage} was seen"
        for record in workspace.glob("runs/*/run.json"):
            key = json.loads(record.read_text())["stages"].get(stage, {}).get("stage_key")
            if key and any((workspace / "store" / "scratch" / key).glob("checkpoints/checkpoint-*")):
                return
        time.sleep(0.1)
    raise AssertionError(f"no checkpoint of {stage} within 400 seconds")


def test_the_published_policy_answers_a_prompt(finished: tuple[Path, dict[str, Any]]) -> None:
    workspace, _ = finished
    code = (
        "import mlflow, sys\n"
        "mlflow.set_tracking_uri(sys.argv[1])\n"
        "pipeline = mlflow.transformers.load_model('models:/quickstart@champion')\n"
        "print(repr(pipeline('3 a+4?', max_new_tokens=5)))\n"
    )
    words = [sys.executable, "-c", code, f"sqlite:///{workspace}/mlflow.db"]
    done = WITH_BOTH.run(words, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "3 a+4?" in done.stdout


def test_the_ledger_leads_from_the_policy_to_its_parents(finished: tuple[Path, dict[str, Any]]) -> None:
    workspace, report = finished
    code = (
        "import json, sys\n"
        "from mlflow import MlflowClient\n"
        "client = MlflowClient(sys.argv[1])\n"
        "ids = [e.experiment_id for e in client.search_experiments()]\n"
        "runs = [r for r in client.search_runs(ids) if r.data.tags.get('vantage.digest') == sys.argv[2]]\n"
        "print(json.dumps([r.data.tags for r in runs if 'vantage.reused_from' not in r.data.tags]))\n"
    )
    policy = report["stages"]["policy"]
    words = [sys.executable, "-c", code, f"sqlite:///{workspace}/mlflow.db", policy["digest"]]
    done = WITH_BOTH.run(words, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (tags,) = json.loads(done.stdout)
    assert tags["vantage.stage_key"] == policy["stage_key"]
    for role, parent in {
        "init": "sft",
        "critic": "value",
        "reference": "sft",
        "prompts": "data.prompts",
    }.items():
        assert tags[f"vantage.parent.{role}"] == report["stages"][parent]["digest"]
