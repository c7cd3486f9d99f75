"""An address at which MLflow keeps nothing is refused before anything is computed; a server that is down is not."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vantage.cli.main import app

FOLDERS = ["./mlruns", "file:///tmp/mlruns"]


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("uri", [*FOLDERS, "http://"])
def test_commands_refuse_an_address_at_which_mlflow_keeps_nothing(
    command: str, uri: str, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    code, output = invoke(command, str(recipe_file), "--workspace", str(tmp_path / "workspace"))
    assert code == 65
    assert output.startswith(f"vantage: MLFLOW_TRACKING_URI='{uri}' ")
    assert not (tmp_path / "workspace" / "runs").exists()


def test_plan_does_not_ask_whether_a_server_answers(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    code, output = invoke("plan", str(recipe_file), "--workspace", str(tmp_path / "workspace"))
    assert code == 0, output


@pytest.mark.parametrize("uri", FOLDERS)
def test_doctor_refuses_it_too(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    code, output = invoke("doctor", "--workspace", str(tmp_path))
    assert code == 69
    assert f"✗ MLflow        MLFLOW_TRACKING_URI='{uri}' is a folder" in output
