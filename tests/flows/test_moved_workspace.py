"""A run whose workspace is renamed ends with exit code 74, writes nothing at the old place, and can go on."""

from pathlib import Path

import pytest

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers import stage_process
from vantage.attempts.launchers.disk_faults import is_disk_fault
from vantage.cli.output import _code_of
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.inputs import Generation, Model
from vantage.schemas.recipe.work import ImportModel
from vantage.schemas.records.job import StageJob, StageResult
from vantage.storage.durable_files import FolderGone, make_folder
from vantage.tasks.stages import run_stage
from vantage.tasks.training.checkpoint_folders import commit, saving_folder


@pytest.mark.slow
def test_the_run_ends_at_once_and_goes_on_when_it_is_back(
    workspace: Workspace, recipe_file: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(FolderGone) as gone,
        orchestrated(workspace, recipe_file, in_process=True) as orchestrator,
    ):
        orchestrator.run.update(prefect_flow_run_ids=("a",))
        workspace.root.rename(tmp_path / "moved")
        orchestrator.run.update(prefect_flow_run_ids=("a", "b"))
    assert str(gone.value).startswith(f"{workspace.root} was moved or removed")
    assert (_code_of(gone.value), is_disk_fault(gone.value)) == (ExitCode.STORAGE, True)
    assert not workspace.root.exists(), "nothing was made in its place"

    (tmp_path / "moved").rename(workspace.root)
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
    [record] = read_runs(workspace)
    assert record.status == "completed"


@pytest.mark.parametrize("after", ["start", "checkpoint"])
def test_a_stages_process_makes_nothing_at_the_old_place(
    workspace: Workspace, tmp_path: Path, after: str
) -> None:
    """The stage's own process is not the one that holds the run."""
    scratch = workspace.store / "scratch" / ("a" * 64)
    job: StageJob = StageJob(
        run_id="0001-small-aaaaaa",
        name="model",
        attempt=1,
        stage_key="a" * 64,
        seed=0,
        work=ImportModel(model=Model(source="builtin:nano")),
        generation=Generation(max_prompt_tokens=8, max_response_tokens=8),
        scratch=scratch,
        output=workspace.store / "staging" / "a",
    )
    file = scratch / "job.json"
    make_folder(scratch)
    file.write_text(job.model_dump_json())
    moved = tmp_path / "moved"

    def stage(job: StageJob) -> StageResult:
        if after == "checkpoint":
            (saving_folder(job.scratch / "checkpoints") / "weights").write_bytes(b"w")
            commit(job.scratch / "checkpoints", step=1, keep=2)
        workspace.root.rename(moved)
        if after == "start":
            return run_stage(job)
        saving_folder(job.scratch / "checkpoints")
        raise AssertionError("a checkpoint was begun at the old place")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stage_process, "import_function", lambda name: stage)
        with pytest.raises(FolderGone) as gone:
            stage_process.compute(file, "the stage")
    assert is_disk_fault(gone.value)
    assert not workspace.root.exists()
    moved.rename(workspace.root)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            stage_process, "import_function", lambda name: lambda job: StageResult(metrics={"there": 1.0})
        )
        stage_process.compute(file, "the stage")
    assert file.with_name("result.json").exists()


def test_whoever_holds_a_stage_key_makes_nothing_at_the_old_place(
    workspace: Workspace, tmp_path: Path
) -> None:
    """Workers on other machines make attempts without holding the run."""
    storage = workspace.storage
    with pytest.raises(FolderGone), storage.exclusive("b" * 64, holder="a worker"):
        workspace.root.rename(tmp_path / "moved")
        storage.scratch_folder("b" * 64)
    assert not workspace.root.exists()
