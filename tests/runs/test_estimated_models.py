"""A recipe whose model another run has made, or is going to make, can be estimated."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.cli.main import app
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.usefixtures("unsent")

NANO_WEIGHTS = 472_704
"""The numbers of recipes/quickstart.yaml."""
FIRST = """\
recipe: first
model: {source: "builtin:nano"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 100}
stages:
  sft: {kind: sft, data: demonstrations, learning_rate: 1.0e-3}
"""
FURTHER = FIRST.replace("first", "further").replace("builtin:nano", "latest/sft").replace("  sft:", "  more:")


def run_first(workspace: Workspace, folder: Path, *, until: str | None = None) -> None:
    """Run the recipe that makes the model, up to and without ``until``."""
    (recipe := folder / "first.yaml").write_text(FIRST)
    with orchestrated(
        workspace, recipe, stage_function="tests.runs.sized_work.run_stage", in_process=True
    ) as orchestrator:
        attempt_all(orchestrator, until=until)
        orchestrator.ledger.close()


def estimated(folder: Path, place: str, *options: str) -> dict[str, Any]:
    (recipe := folder / "further.yaml").write_text(FURTHER)
    command = ["estimate", str(recipe), "--gpu", "h100", "--workspace", place, "--json", *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_model_that_another_run_made_is_estimated_as_its_folder(
    tmp_path: Path, workspace: Workspace
) -> None:
    run_first(workspace, tmp_path)
    [record] = read_runs(workspace)
    folder = workspace.storage.local_folder(str(record.stages["sft"].digest))
    found = estimated(tmp_path, workspace.address)
    assert found["weights"] == NANO_WEIGHTS
    assert found == estimated(tmp_path, workspace.address, "--set", f"model.source={folder}")


def test_a_model_that_is_not_made_yet_has_the_shape_of_what_its_run_begins_with(
    tmp_path: Path, workspace: Workspace
) -> None:
    run_first(workspace, tmp_path, until="sft")
    found = estimated(tmp_path, workspace.address)
    assert found["weights"] == NANO_WEIGHTS
    note = "latest/sft is not made yet and is counted as the model that its run begins with"
    assert found["model_note"] == note


def test_a_model_in_a_bucket_is_estimated_from_its_configuration(
    bucket: str, tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "one machine"))
    run_first(Workspace.at(bucket), tmp_path)
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "another"))
    assert estimated(tmp_path, bucket)["weights"] == NANO_WEIGHTS
    assert not list((tmp_path / "another").rglob("weights.txt")), "weights are not fetched"


def test_a_stage_that_there_is_not_is_refused_with_those_that_there_are(
    tmp_path: Path, workspace: Workspace
) -> None:
    run_first(workspace, tmp_path)
    (recipe := tmp_path / "further.yaml").write_text(FURTHER.replace("latest/sft", "latest/nosft"))
    done = CliRunner().invoke(app, ["estimate", str(recipe), "--workspace", workspace.address])
    assert done.exit_code == 65
    assert "has no step nosft; it has" in done.stderr
