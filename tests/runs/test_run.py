"""Runs are kept in real folders with real locks; another process is one that holds the lock through its own descriptor."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vantage.runs.record import StageRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import (
    Run,
    acquire_run,
    acquire_run_by_id,
    dead_runs,
    is_active,
    read_run,
    read_runs,
    recipe_digest,
)
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.recipe import ResolvedRecipe

HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def recipe(recipe_file: Path) -> ResolvedRecipe:
    return load_resolved(recipe_file)[0]


def test_a_run_is_minted_with_its_resolved_recipe(workspace: Workspace, recipe: ResolvedRecipe) -> None:
    with acquire_run(workspace, recipe, source="fake.yaml") as run:
        record = read_run(workspace, run.record.run_id)
    assert record.run_id.startswith("0001-fake-")
    assert record.recipe == recipe
    assert record.recipe_digest == recipe_digest(recipe)
    assert (record.status, record.source) == ("running", "fake.yaml")


@pytest.mark.parametrize("status", ["running", "failed", "resumable"])
def test_the_same_recipe_goes_on_with_its_unfinished_run(
    workspace: Workspace, recipe: ResolvedRecipe, status: str
) -> None:
    with acquire_run(workspace, recipe, source="a") as first:
        first.update(status=status)
    with acquire_run(workspace, recipe, source="a") as second:
        assert second.record.run_id == first.record.run_id
        assert second.record.status == "running"


def test_whether_runs_live_is_looked_at_before_others_have_to_wait(
    workspace: Workspace, recipe: ResolvedRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bucket each look takes seconds, so the lock that all new runs wait for is taken only if a run is dead."""
    taken = []
    lock = type(workspace.records).creation_lock

    def counted(records: Any) -> Any:
        taken.append(1)
        return lock(records)

    with acquire_run(workspace, recipe, source="a"), acquire_run(workspace, recipe, source="a"):
        monkeypatch.setattr(type(workspace.records), "creation_lock", counted)
        assert list(dead_runs(workspace)) == []
        assert taken == []
    run_id = read_runs(workspace)[0].run_id
    acquired = acquire_run_by_id(workspace, run_id)
    with acquired as run:
        run.update(status="running")
    taken.clear()
    assert run_id in [dead.record.run_id for dead in dead_runs(workspace)]
    assert taken == [1]


def test_two_runs_are_not_begun_at_the_same_moment(workspace: Workspace, recipe: ResolvedRecipe) -> None:
    """A new run waits for the lock of the folder of all runs, which another descriptor holds here."""
    begun = threading.Event()

    def begin() -> None:
        with acquire_run(workspace, recipe, source="b"):
            begun.set()

    beginning = threading.Thread(target=begin)
    with workspace.records.creation_lock():
        beginning.start()
        assert not begun.wait(0.3)
    assert begun.wait(30)
    beginning.join()


def test_dead_runs_are_those_that_nobody_drives(
    workspace: Workspace, recipe: ResolvedRecipe, recipe_file: Path
) -> None:
    other = load_resolved(recipe_file, ["seed=5"])[0]
    with acquire_run(workspace, recipe, source="a") as dead:
        pass  # as a kill leaves it: running, and its lock free
    with acquire_run(workspace, other, source="a") as alive:
        assert [run.record.run_id for run in dead_runs(workspace)] == [dead.record.run_id]
        assert [run.record.run_id for run in dead_runs(workspace)] == [dead.record.run_id], "held no longer"
        alive.update(status="completed")
    assert [run.record.run_id for run in dead_runs(workspace)] == [dead.record.run_id]


@pytest.mark.parametrize("status", ["completed", "gate_closed"])
def test_a_run_that_came_to_its_end_is_not_gone_on_with(
    workspace: Workspace, recipe: ResolvedRecipe, status: str
) -> None:
    with acquire_run(workspace, recipe, source="a") as first:
        first.update(status=status)
    with acquire_run(workspace, recipe, source="a") as second:
        assert second.record.run_id.startswith("0002-fake-")


def test_another_recipe_gets_a_run_of_its_own(
    workspace: Workspace, recipe: ResolvedRecipe, recipe_file: Path
) -> None:
    other = load_resolved(recipe_file, ["stages.policy.algorithm.clip_range_high=0.2"])[0]
    assert recipe_digest(other) != recipe_digest(recipe)
    with acquire_run(workspace, recipe, source="a"):
        pass
    with acquire_run(workspace, other, source="a") as run:
        assert run.record.number == 2


def test_a_run_that_somebody_drives_is_left_to_him(workspace: Workspace, recipe: ResolvedRecipe) -> None:
    with acquire_run(workspace, recipe, source="a") as first:
        with acquire_run(workspace, recipe, source="a") as second:
            assert second.record.run_id != first.record.run_id
        with (
            pytest.raises(RunError, match="is being driven by another process"),
            acquire_run_by_id(workspace, first.record.run_id),
        ):
            pass


def test_resuming_takes_a_run_whatever_its_status(workspace: Workspace, recipe: ResolvedRecipe) -> None:
    with acquire_run(workspace, recipe, source="a") as first:
        first.update(status="completed")
    with acquire_run_by_id(workspace, first.record.run_id) as again:
        assert again.record.recipe == recipe


def test_who_drives_a_run_is_known_from_outside_and_ends_with_the_process(
    workspace: Workspace, recipe: ResolvedRecipe
) -> None:
    with acquire_run(workspace, recipe, source="a") as run:
        run_id = run.record.run_id
    assert not is_active(workspace, run_id)
    lock = workspace.folder(run_id) / "lock"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    assert is_active(workspace, run_id)
    other.kill()
    other.communicate()
    assert not is_active(workspace, run_id)


def test_the_newest_run_is_the_one_with_the_highest_number(
    workspace: Workspace, recipe: ResolvedRecipe
) -> None:
    for _ in range(3):
        with acquire_run(workspace, recipe, source="a") as run:
            run.update(status="completed")
    assert [record.number for record in read_runs(workspace)] == [3, 2, 1]


def test_changes_of_a_stage_are_on_disk_at_once(workspace: Workspace, recipe: ResolvedRecipe) -> None:
    with acquire_run(workspace, recipe, source="a") as run:
        run.set_stage("sft", StageRecord(status="running", attempt=2))
        run.update_stage("sft", status="failed", reason="the disk is full")
        stage = read_run(workspace, run.record.run_id).stages["sft"]
    assert (stage.status, stage.attempt, stage.reason) == ("failed", 2, "the disk is full")


def test_what_a_killed_writer_of_a_record_left_is_removed_when_the_run_goes_on(
    workspace: Workspace, recipe: ResolvedRecipe
) -> None:
    with acquire_run(workspace, recipe, source="a") as run:
        folder = run.folder
    (folder / ".run.json.0123456789abcdef.new").write_text("{")
    (folder / ".other.json.0123456789abcdef.new").write_text("{")
    with acquire_run(workspace, recipe, source="a") as run:
        assert run.folder == folder
    assert sorted(path.name for path in folder.glob(".*")) == [".other.json.0123456789abcdef.new"]


def side_by_side(*functions: Callable[[], object]) -> None:
    """Call functions in threads of their own, a moment after each other, and wait for all."""
    threads = [threading.Thread(target=each) for each in functions]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()


def test_threads_that_change_one_run_lose_nothing(
    workspace: Workspace, recipe: ResolvedRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is worked out from the record as it is; here others run before it is written."""
    update, set_stage = Run.update, Run.set_stage

    def late_update(run: Run, **changes: Any) -> None:
        time.sleep(0.1)
        update(run, **changes)

    def late_stage(run: Run, step: str, stage: StageRecord) -> None:
        time.sleep(0.1)
        set_stage(run, step, stage)

    with acquire_run(workspace, recipe, source="a") as run:
        run.set_stage("sft", StageRecord(status="running"))
        run.add_flow_run("first", server="here")
        with monkeypatch.context() as patched:
            patched.setattr(Run, "update", late_update)
            patched.setattr(Run, "set_stage", late_stage)
            side_by_side(
                lambda: run.update_stage("sft", attempt=2),
                lambda: run.update_stage("sft", reason="the disk is full"),
            )
            side_by_side(
                lambda: run.add_flow_run("second", server="here"),
                lambda: run.add_attempt("third", server="here", attempt="key/1"),
                lambda: run.end_flow_run("first", "completed", "", {}),
            )
        record = read_run(workspace, run.record.run_id)
    assert (record.stages["sft"].attempt, record.stages["sft"].reason) == (2, "the disk is full")
    assert record.prefect_flow_run_ids == ("first", "second")
    assert [(each.flow_run_id, each.status) for each in record.open_flow_runs] == [
        ("first", "completed"),
        ("second", None),
        ("third", None),
    ]


def test_what_the_stages_add_up_to(workspace: Workspace, recipe: ResolvedRecipe) -> None:
    def outcome(run: Run, *statuses: str) -> str:
        run.update(
            stages={f"s{i}": StageRecord.model_validate({"status": s}) for i, s in enumerate(statuses)}
        )
        return run.outcome()

    with acquire_run(workspace, recipe, source="a") as run:
        assert outcome(run, "completed", "reused") == "completed"
        assert outcome(run, "completed", "gate_closed", "blocked") == "gate_closed"
        assert outcome(run, "gate_closed", "resumable", "blocked") == "resumable"
        assert outcome(run, "completed", "running", "waiting") == "resumable"
        assert outcome(run, "failed", "resumable", "gate_closed") == "failed"


@pytest.mark.parametrize("run_id", ["../escape", "0001-fake-00000", "", "/etc"])
def test_what_is_no_run_id_is_refused(workspace: Workspace, run_id: str) -> None:
    with pytest.raises(RunError, match="is not one of Vantage's; `vantage status` lists the runs"):
        read_run(workspace, run_id)


def test_a_run_that_is_not_there_is_refused(workspace: Workspace) -> None:
    with pytest.raises(RunError, match="there is no run 0001-fake-0a1b2c"):
        read_run(workspace, "0001-fake-0a1b2c")


def test_a_damaged_record_is_named_and_does_not_hide_the_others(
    workspace: Workspace, recipe: ResolvedRecipe
) -> None:
    with acquire_run(workspace, recipe, source="a") as run:
        run.update(status="completed")
    with acquire_run(workspace, recipe, source="a") as damaged:
        pass
    (damaged.folder / "run.json").write_text('{"run_id": ')
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        read_run(workspace, damaged.record.run_id)
    assert [record.run_id for record in read_runs(workspace)] == [run.record.run_id]


def test_a_workspace_that_cannot_be_made_is_refused(tmp_path: Path, recipe: ResolvedRecipe) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(RunError, match="name another with --workspace DIR"),
        acquire_run(Workspace(tmp_path / "file"), recipe, source="a"),
    ):
        pass


@pytest.mark.parametrize("name", ["a?b", "a%20b", "100%", "a#b", "a\nb", "a\x1b[2Jb"])
def test_a_path_that_would_move_the_databases_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    for root in (tmp_path / name, tmp_path / name / "inside", tmp_path / "link"):
        if root.name == "link":
            root.symlink_to(tmp_path / name)
        with pytest.raises(
            RunError, match=r"workspace '.*' has '.+' in its path.*--workspace DIR"
        ) as refused:
            Workspace(root)
        assert str(refused.value).isprintable()
    assert Workspace(tmp_path / "a b ü&+;'").root.name == "a b ü&+;'"
