"""Commands that Vantage prints are commands that a shell runs."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vantage.runs import own_commands

BIN = Path(sys.executable).parent


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a shell in which the virtual environment is not activated."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("name", ["vantage", "mlflow", "prefect"])
def test_a_program_that_is_on_no_search_path_is_named_by_its_full_path(name: str) -> None:
    printed = own_commands.program(name)
    assert printed == shlex.quote(str(BIN / name))
    assert subprocess.run(f"test -x {printed}", shell=True, check=False).returncode == 0


def test_a_program_that_the_search_path_finds_is_named_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}/usr/bin")
    assert own_commands.program("vantage") == "vantage"


def test_another_installations_program_of_that_name_is_not_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "vantage"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{BIN}")
    assert own_commands.program("vantage") == str(BIN / "vantage")


@pytest.mark.slow
@pytest.mark.usefixtures("outside")
def test_a_run_command_works_as_it_is_printed(tmp_path: Path) -> None:
    """Braces, spaces and stars in overrides and paths survive the shell."""
    workspace = str(tmp_path / "my workspace")
    printed = own_commands.run_command(
        "quickstart",
        ["data.prompts.split={validation: 7, test: 256}"],
        workspace,
        "stages.value.gate.at_least=0.17",
    ).replace(" run quickstart", " plan quickstart --json", 1)
    done = subprocess.run(printed, shell=True, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"recipe": "quickstart"' in done.stdout


def test_a_port_on_which_something_listens_is_not_used() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert own_commands.usable_port(port) != port
    assert own_commands.usable_port(port) == port
