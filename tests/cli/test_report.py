"""``vantage report`` works as it is typed."""

import json
import webbrowser
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.support.orchestrated import orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.runs.workspace import Workspace


def report(workspace: Workspace, *words: str) -> Result:
    return CliRunner().invoke(app, ["report", *words, "--workspace", str(workspace.root)])


@pytest.fixture
def begun(workspace: Workspace, recipe_file: Path) -> str:
    """Return a run that has just begun, and whose process is gone."""
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        orchestrator.ledger.close()
        return orchestrator.run.record.run_id


def test_it_is_written_beside_the_record_or_where_it_is_asked_for(
    workspace: Workspace, begun: str, tmp_path: Path
) -> None:
    done = report(workspace, "latest")
    file = workspace.folder(begun) / "report.html"
    assert (done.exit_code, done.stdout.strip()) == (0, str(file))
    assert "The run was interrupted" in file.read_text()
    elsewhere = tmp_path / "a" / "b.html"
    done = report(workspace, "1", "--to", str(elsewhere), "--json")
    assert json.loads(done.stdout) == {"report": str(elsewhere)}
    assert elsewhere.read_bytes() == file.read_bytes()


def test_it_is_opened(workspace: Workspace, begun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--open`` opens the report in a browser, and fails where none can be started."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: not opened.append(url))
    assert report(workspace, "latest", "--open").exit_code == 0
    assert opened == [(workspace.folder(begun) / "report.html").as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    done = report(workspace, "latest", "--open")
    assert done.exit_code == ExitCode.BAD_INPUT and "no browser could be started" in done.stderr


def test_what_cannot_be_is_a_sentence(workspace: Workspace, begun: str, tmp_path: Path) -> None:
    unknown = report(workspace, "0099")
    assert unknown.exit_code == ExitCode.BAD_INPUT and "Traceback" not in unknown.stderr
    folder = report(workspace, "latest", "--to", str(tmp_path))
    assert folder.exit_code == ExitCode.BAD_INPUT and "is a folder; name a file" in folder.stderr
    assert tmp_path.is_dir()
    annex = report(workspace, "latest", "--annex", "gdpr", "--to", str(tmp_path / "page.html"))
    assert annex.exit_code == ExitCode.BAD_INPUT
    assert "--annex gdpr is not known; name one of: ai-act" in annex.stderr
    assert not (tmp_path / "page.html").exists()
