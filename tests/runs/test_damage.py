"""`plan` and `status` report damage to what is stored, and end with the right exit code."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.runs.damage import damage_of
from vantage.runs.record import PublishedCopy
from vantage.runs.run import read_run
from vantage.runs.workspace import Workspace
from vantage.storage.sealed_folders import seal

pytestmark = pytest.mark.usefixtures("unsent")


@pytest.fixture
def finished(workspace: Workspace, recipe_file: Path) -> tuple[Workspace, str]:
    """Return a workspace and the run that made everything in it."""
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status="completed")
    return workspace, orchestrator.run.record.run_id


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def object_of(workspace: Workspace, run_id: str, step: str) -> Path:
    return workspace.store / "objects" / str(read_run(workspace, run_id).stages[step].digest)


def flip(file: Path) -> None:
    """Flip one bit of a file, which keeps its size."""
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_is_told_by_plan_and_by_status_that_reads(
    finished: tuple[Workspace, str], recipe_file: Path
) -> None:
    workspace, run_id = finished
    place = ["--workspace", str(workspace.root)]
    assert call("plan", str(recipe_file), *place)[0] == ExitCode.OK
    assert call("status", run_id, "--verify", *place)[0] == ExitCode.OK
    flip(object_of(workspace, run_id, "sft") / "weights.txt")

    code, printed, _ = call("plan", str(recipe_file), "--json", *place)
    assert code == ExitCode.STORAGE
    steps = {step["name"]: step for step in json.loads(printed)["steps"]}
    [damage] = steps["sft"]["damage"]
    assert "weights.txt: sha256 is" in damage
    assert steps["sft"]["action"] == "run"
    assert "makes the artifact again" in steps["sft"]["reasons"][-1]
    assert steps["model"]["damage"] == []

    assert call("status", *place)[0] == ExitCode.OK, "sizes are as they were, and nothing was read"
    code, _, errors = call("status", run_id, "--verify", *place)
    assert code == ExitCode.STORAGE
    assert f"run {run_id}: sft is damaged: objects/" in errors


@pytest.mark.parametrize("damage", ["missing", "shorter", "gone"])
def test_what_names_and_sizes_show_every_status_tells(finished: tuple[Workspace, str], damage: str) -> None:
    workspace, run_id = finished
    folder = object_of(workspace, run_id, "sft")
    if damage == "gone":
        shutil.rmtree(folder)
    elif damage == "missing":
        (folder / "weights.txt").unlink()
    else:
        (folder / "weights.txt").chmod(0o644)
        (folder / "weights.txt").write_text("")
    for arguments in (["status"], ["status", run_id]):
        code, printed, errors = call(*arguments, "--json", "--workspace", str(workspace.root))
        assert code == ExitCode.STORAGE
        told = json.loads(printed)
        view = told["runs"][0] if "runs" in told else told
        assert list(view["damage"]) == ["sft"]
        assert "run the same recipe again" in errors


def test_a_copy_in_mlflow_is_compared_with_what_was_published(
    finished: tuple[Workspace, str], tmp_path: Path
) -> None:
    workspace, run_id = finished
    copy = tmp_path / "copy"
    (copy / "model").mkdir(parents=True)
    (copy / "model" / "model.safetensors").write_bytes(b"weights")
    digest = seal(copy / "model")
    (copy / "components" / "tokenizer").mkdir(parents=True)
    shutil.copy(copy / "model" / "manifest.json", copy / "components" / "tokenizer")
    kept = PublishedCopy(location=copy.as_uri(), digest=digest)
    record = read_run(workspace, run_id).model_copy(update={"copies": {"quickstart": kept}})
    assert damage_of(workspace, record, verify=True) == {}
    flip(copy / "model" / "model.safetensors")
    assert damage_of(workspace, record, verify=False) == {}
    [problem] = damage_of(workspace, record, verify=True)["quickstart"]
    assert problem.startswith("MLflow's copy: model: model.safetensors: sha256 is")
    (copy / "model" / "model.safetensors").unlink()
    assert damage_of(workspace, record, verify=False)["quickstart"] == (
        "MLflow's copy: model: model.safetensors: is missing",
    )
