"""A run that was to be detached but is refused ends the command with its exit code and message."""

from pathlib import Path

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.detached import start_detached
from vantage.runs.workspace import Workspace


def test_what_is_refused_ends_with_its_code_and_its_message(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "workspace")
    ended = start_detached([str(tmp_path / "missing.yaml"), "--workspace", str(workspace.root)], workspace)
    assert (ended.run_id, ended.exit_code) == (None, ExitCode.BAD_INPUT)
    assert "missing.yaml" in ended.log.read_text()
    assert list(workspace.runs.glob("[0-9]*")) == []
