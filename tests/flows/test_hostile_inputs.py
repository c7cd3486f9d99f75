"""The command line ends with exit code 65, the problems on standard error and no traceback for what the loader refuses."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.models.damage import BY_HAND
from tests.schemas.hostile import (
    OVERRIDES,
    PATHS,
    TEXTS,
    WHOLE,
    lay_out,
)
from tests.support.every import every
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.models.builtin import build_builtin

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the odd files that the cases name."""
    folder = tmp_path_factory.mktemp("here")
    lay_out(folder)
    (folder / "whole.yaml").write_text(WHOLE + "publish: []\n")
    return folder


def refused(*arguments: str) -> str:
    """Return what a command prints on standard error; assert that it ends as a refusal."""
    done = CliRunner().invoke(app, [*arguments, "--workspace", "workspace"])
    said = done.stderr
    assert done.exit_code == ExitCode.BAD_INPUT, (done.exit_code, said, done.exception)
    assert said.startswith("vantage: ")
    assert "Traceback" not in said
    assert "should not happen" not in said
    assert not Path("workspace").exists()
    return said


@every("command", ["plan", "run", "sweep"])
@every("case", TEXTS)
def test_a_text(here: Path, monkeypatch: pytest.MonkeyPatch, command: str, case: str) -> None:
    """A recipe's text that must be refused ends the command with exit code 65 and its problems."""
    monkeypatch.chdir(here)
    data, said = TEXTS[case]
    (here / "x.yaml").write_bytes(data)
    told = refused(command, "x.yaml")
    assert command == "sweep" or said in told


@every("override", OVERRIDES)
def test_an_override(here: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    """An override that must be refused ends the command with exit code 65 and its problems."""
    monkeypatch.chdir(here)
    assert OVERRIDES[override] in refused("plan", "whole.yaml", "--set", override)


@every("command", ["plan", "sweep"])
@every("path", PATHS)
def test_a_path(here: Path, monkeypatch: pytest.MonkeyPatch, command: str, path: str) -> None:
    """A path that must be refused ends the command with exit code 65 and its problems."""
    monkeypatch.chdir(here)
    assert PATHS[path] in refused(command, path)


IN_FILES = [name for name, (_, said) in BY_HAND.items() if any(word in said for word in (
    "is no whole number", "holds no", "but the weights", "ids up to", "no valid safetensors", "no vocabulary"))]  # fmt: skip


@every("case", IN_FILES)
def test_a_model_folder_is_refused_by_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    build_builtin("tiny", tmp_path / "model", seed=1)
    damage, said = BY_HAND[case]
    damage(tmp_path / "model")
    assert said in refused("plan", "quickstart", "--set", "model.source=model")


@every(
    "arguments, said",
    [
        (["plan", "x\udcff.yaml"], r"x\udcff.yaml: there is no such file"),
        (["plan", "escape.yaml"], "escape.yaml:1: is not YAML: OverflowError"),
        (["sweep", "/dev/zero"], "is not a file"),
        (["run", "quickstart", "--set", "recipe=\x1b[31m\u2028x"], r"\x1b[31m\u2028x"),
        (["plan", "quickstart", "--set", "model.source=" + "a" * 300], "File name too long"),
    ],
)
def test_in_a_process_of_its_own(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "escape.yaml").write_text('recipe: "\\UFFFFFFFF"')
    done = subprocess.run(
        [sys.executable, "-c", "from vantage.cli.main import main; main()", *arguments],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    told = done.stderr.decode()
    assert (done.returncode, done.stdout) == (ExitCode.BAD_INPUT, b"")
    assert said in told
    assert "Traceback" not in told
    assert "\x1b" not in told


def test_doctor_looks_past_a_workspace_of_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of runs whose files are not runs are reported as warnings; the machine is not broken by them."""
    monkeypatch.chdir(tmp_path)
    for number, content in enumerate((b"", b"[" * 200_000, b"\xff\x00", b'{"a": 1e999}', b"9" * 5000, b"{}")):
        run = tmp_path / "workspace" / "runs" / f"000{number}-x-abcdef"
        run.mkdir(parents=True)
        (run / "run.json").write_bytes(content)
    done = CliRunner().invoke(app, ["doctor", "--workspace", "workspace"])
    assert done.exit_code in (ExitCode.OK, ExitCode.UNAVAILABLE), done.exception
    assert "Traceback" not in done.output
    shutil.rmtree(tmp_path / "workspace")
