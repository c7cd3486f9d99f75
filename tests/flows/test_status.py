"""Runs looked at from outside."""

from pathlib import Path

from flows.runs import StageRecord, Workspace, drive, read_run
from flows.status import look
from schemas.loading import load_recipe
from tasks.training.progress import Progress
from tasks.training.scratch import PROGRESS

KEY = "a" * 64


def test_a_running_stage_shows_how_far_it_is_and_a_dead_run_that_it_is_dead(
    workspace: Workspace, recipe_file: Path
) -> None:
    scratch = workspace.store / "scratch" / KEY
    scratch.mkdir(parents=True)
    Progress(scratch / PROGRESS, total=400, phase="training").update(400, metrics={"loss": 0.5})
    with drive(workspace, load_recipe(recipe_file), source="a") as run:
        run.set_stage("model", StageRecord(status="completed", digest="b" * 64))
        run.set_stage("sft", StageRecord(status="running", attempt=1, stage_key=KEY))
        view = look(workspace, read_run(workspace, run.record.run_id))
        assert (view.status, view.status_of("sft")) == ("running", "running")
        assert view.progress["sft"].step == 400

    view = look(workspace, read_run(workspace, run.record.run_id))
    assert (view.status, view.status_of("sft"), view.status_of("model")) == (
        "interrupted",
        "interrupted",
        "completed",
    )
    told = view.as_json()
    assert told["status"] == "interrupted"
    assert told["stages"]["sft"]["progress"]["metrics"] == {"loss": 0.5}
    assert told["stages"]["model"]["progress"] is None
