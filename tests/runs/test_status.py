"""``vantage status`` describes runs from outside."""

import io
import os
import socket
from pathlib import Path

from rich.console import Console

from vantage.runs.console import show_run
from vantage.runs.record import StageRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run, read_run
from vantage.runs.status import RunState, run_state
from vantage.runs.workspace import Workspace
from vantage.storage.store import Store
from vantage.tasks.training.progress import Progress
from vantage.tasks.training.scratch import PROGRESS

KEY = "a" * 64


def test_a_running_stage_shows_how_far_it_is_and_a_dead_run_that_it_is_dead(
    workspace: Workspace, recipe_file: Path
) -> None:
    scratch = workspace.store / "scratch" / KEY
    scratch.mkdir(parents=True)
    Progress(scratch / PROGRESS, total=400, phase="training").update(400, metrics={"loss": 0.5})
    with acquire_run(workspace, load_resolved(recipe_file)[0], source="a") as run:
        run.set_stage("model", StageRecord(status="completed", digest="b" * 64))
        run.set_stage("sft", StageRecord(status="running", attempt=1, stage_key=KEY))
        view = run_state(workspace, read_run(workspace, run.record.run_id))
        assert (view.status, view.status_of("sft")) == ("running", "running")
        assert view.progress["sft"].step == 400

    view = run_state(workspace, read_run(workspace, run.record.run_id))
    assert (view.status, view.status_of("sft"), view.status_of("model")) == (
        "interrupted",
        "interrupted",
        "completed",
    )
    told = view.as_json()
    assert told["status"] == "interrupted"
    assert told["stages"]["sft"]["progress"]["metrics"] == {"loss": 0.5}
    assert told["stages"]["model"]["progress"] is None


def test_a_step_that_another_run_computes_is_shown_with_that_run(
    workspace: Workspace, recipe_file: Path
) -> None:
    """The name is shown as long as the other run computes, and as long as this run waits for it."""
    store = Store(workspace.store)
    with acquire_run(workspace, load_resolved(recipe_file)[0], source="a") as run:
        run.update(stages={"model": StageRecord(), "sft": StageRecord()})
        run.use_key("sft", KEY)

        def shown() -> tuple[RunState, str]:
            view, text = run_state(workspace, read_run(workspace, run.record.run_id)), io.StringIO()
            show_run(Console(file=text, width=200), view)
            return view, text.getvalue()

        with store.exclusive(KEY, holder="run 0007-other-abcdef"):
            view, text = shown()
            holder = view.computed_by["sft"]
            assert holder.startswith(
                f"run 0007-other-abcdef (process {os.getpid()} on {socket.gethostname()}"
            )
            assert f"being computed by {holder}; this run takes what it makes" in " ".join(text.split())
            stages = view.as_json()["stages"]
            assert (stages["sft"]["computed_by"], stages["model"]["computed_by"]) == (holder, None)
        assert shown()[0].computed_by == {}
        with store.exclusive(KEY, holder=f"run {run.record.run_id}"):
            assert shown()[0].computed_by == {}, "it is about to compute it itself"
    with store.exclusive(KEY, holder="run 0007-other-abcdef"):
        assert run_state(workspace, read_run(workspace, run.record.run_id)).computed_by == {}


def test_a_run_that_ends_while_it_is_looked_at_is_not_shown_as_interrupted(
    workspace: Workspace, recipe_file: Path
) -> None:
    with acquire_run(workspace, load_resolved(recipe_file)[0], source="a") as run:
        before = read_run(workspace, run.record.run_id)
        run.update(status="completed")
    assert before.status == "running"
    assert run_state(workspace, before).status == "completed"


def test_status_shows_the_thresholds_of_gates_that_are_still_to_be_judged(
    workspace: Workspace, recipe_file: Path
) -> None:
    with acquire_run(workspace, load_resolved(recipe_file)[0], source="a") as run:
        known = {name: StageRecord() for name in ("sft", "reward", "value", "policy", "evaluation")}
        run.update(stages=known)
        scratch = workspace.store / "scratch" / KEY
        scratch.mkdir(parents=True)
        progress = Progress(scratch / PROGRESS, total=14, phase="running")
        for step in range(4):
            progress.update(step)
        run.set_stage("reward", StageRecord(status="running", attempt=1, stage_key=KEY))
        view = run_state(workspace, read_run(workspace, run.record.run_id))
    report = view.progress["reward"].model_copy(update={"seconds_left": 495.0})
    view = RunState(view.record, view.interrupted, {"reward": report})
    for width in (80, 160):
        printed = io.StringIO()
        show_run(Console(file=printed, width=width), view)
        text = printed.getvalue()
        assert "8 min left" in text
        assert "gate pair_accuracy >= 0.75" in text
        assert "gate explained_variance >= 0.3" in text
        assert max(map(len, text.splitlines())) <= width
    told = view.as_json()["stages"]
    assert told["value"]["gates"][0]["at_least"] == 0.3
    assert told["reward"]["progress"]["seconds_left"] == 495.0
    assert told["sft"]["gates"] == []
