"""A program that is forked from a process whose imports are done behaves as one that is started by itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import forked_with_torch

pytestmark = pytest.mark.slow


def main() -> None:
    """Show what has come, and wait where that is asked."""
    print(
        os.getpid(), os.getpgid(0), "torch" in sys.modules, os.getcwd(), os.environ.get("GIVEN"), flush=True
    )
    print(*sys.argv[1:], file=sys.stderr, flush=True)
    if sys.argv[1] == "waits":
        time.sleep(600)


def start(*arguments: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    forked_with_torch.prepare()
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked_with_torch", __name__, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(forked_with_torch.ROOT), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_arguments_variables_and_output_are_the_programs_own(tmp_path: Path) -> None:
    shown, errors = start("shows", "a b", folder=tmp_path, GIVEN="here").communicate(timeout=60)
    pid, group, *rest = shown.split()
    assert rest == ["True", str(tmp_path), "here"]
    assert group == pid, "killing the group of one ends no other"
    assert errors.startswith("shows a b\n")
    again, _ = start("shows", folder=tmp_path).communicate(timeout=60)
    assert again.split()[-1] == "None", "no variable of another program"


@pytest.mark.parametrize("killed", ["the program", "its fork"])
def test_each_ends_with_the_other(killed: str, tmp_path: Path) -> None:
    program = start("waits", folder=tmp_path)
    assert program.stdout is not None
    fork = psutil.Process(int(program.stdout.readline().split()[0]))
    os.kill(program.pid if killed == "the program" else fork.pid, signal.SIGKILL)
    program.communicate(timeout=30)
    assert program.returncode == (-signal.SIGKILL if killed == "the program" else 1)
    psutil.wait_procs([fork], timeout=30)
    assert not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE
