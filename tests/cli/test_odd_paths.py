"""Impossible paths, and policies and overrides of odd characters, get one sentence and exit code 65; nothing is written."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.signing.policy import VARIABLE

LONG = "w" * 300


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stderr


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a ring of links, in which commands run."""
    (tmp_path / "ring").symlink_to("back")
    (tmp_path / "back").symlink_to("ring")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = [("plan", "quickstart"), ("run", "quickstart"), ("status",), ("gc",), ("audit", "latest"), ("report", "latest")]  # fmt: skip
WORKSPACES = {
    "long": (LONG, "has a folder name of 300 bytes, and there is room for 255"),
    "deep": ("w/" * 2500, "and there is room for 3,500"),
    "ring": ("ring/x", "is no path"),
    "not UTF-8": (os.fsdecode(b"n\xff"), "is not UTF-8"),
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("name", WORKSPACES)
def test_a_workspace_that_is_no_path(odd: Path, command: tuple[str, ...], name: str) -> None:
    workspace, rule = WORKSPACES[name]
    code, said = run(*command, "--workspace", workspace)
    assert (code, rule in said, "--workspace DIR" in said) == (ExitCode.BAD_INPUT, True, True), said
    assert len(said) < 400
    assert sorted(path.name for path in odd.iterdir()) == ["back", "ring"], "nothing was made"


@pytest.mark.parametrize("command", ["data inspect", "init", "plan", "run", "report", "export"])
@pytest.mark.parametrize("name", [f"{LONG}.yaml", "ring", os.fsdecode(b"n\xff.yaml")])
def test_a_file_that_is_no_path(odd: Path, command: str, name: str) -> None:
    code, said = run(*command.split(), name)
    assert code in (ExitCode.BAD_INPUT, 2), said
    assert not [word for word in ("Errno", "codec", "should not happen", "Traceback") if word in said]


@pytest.mark.parametrize("text", ["[1, 2]", "words", "3", "null", "- a", ""])
def test_a_policy_that_is_no_mapping(odd: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (odd / "policy.yaml").write_text(text)
    monkeypatch.setenv(VARIABLE, str(odd / "policy.yaml"))
    code, said = run("plan", "quickstart")
    assert (code, f"{VARIABLE}={odd / 'policy.yaml'}" in said) == (ExitCode.BAD_INPUT, True)
    assert "must be a mapping" in said or "a policy starts with `models:`" in said


@pytest.mark.parametrize(
    "key", ["*", "(", "[", "a(b", "stages.sft.+", "stages.evaluation.gate.0.*", "data.\\d", "stages.a|b"]
)
def test_an_override_of_characters_that_patterns_use(odd: Path, key: str) -> None:
    code, said = run("plan", "quickstart", "--set", f"{key}=1")
    assert (code, "should not happen" in said) == (ExitCode.BAD_INPUT, False), said
