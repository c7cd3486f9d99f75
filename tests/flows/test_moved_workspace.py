"""A workspace that is renamed while a run works in it: exit code 74, nothing at the old place, and the run can go on."""

from pathlib import Path

import pytest

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers.disk_faults import is_disk_fault
from vantage.cli.output import _code_of
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.storage.durable_files import FolderGone


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
