"""A module that is started from a process whose imports are done behaves as one that is started by itself."""

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support import prepared_process
from tests.support.prepared_process import run, started


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a process of this test, which loads nothing."""
    monkeypatch.setattr(prepared_process, "_prepared", None)
    monkeypatch.setattr(prepared_process, "LOADED", ())
    yield
    prepared_process.end()


def main() -> None:
    """Run the case that the first argument names."""
    match sys.argv[1]:
        case "shows":
            print(os.getppid(), os.environ.get("GIVEN"), sys.stdin.read(), *sys.argv[2:])
            print("to the other stream", file=sys.stderr)
        case "exits":
            sys.exit(7)
        case "fails":
            raise ValueError("it fails")
        case "hangs":
            time.sleep(600)


def test_arguments_and_variables_reach_it_and_its_output_comes_back() -> None:
    ended = run(__name__, "shows", "a b", environment={"GIVEN": "here"})
    assert ended.returncode == 0, ended.stderr
    parent, *shown = ended.stdout.split(maxsplit=1)
    assert shown == ["here  a b\n"]
    assert ended.stderr == "to the other stream\n"
    again = run(__name__, "shows")
    assert again.stdout == f"{parent} None \n", "one process forks all, and keeps no variable of another call"


@pytest.mark.parametrize(
    ("does", "code", "said"), [("exits", 7, ""), ("fails", 1, "ValueError: it fails\n"), ("nothing", 0, "")]
)
def test_it_ends_with_the_code_of_its_main(does: str, code: int, said: str) -> None:
    ended = run(__name__, does)
    assert ended.returncode == code
    assert ended.stderr.endswith(said) and bool(ended.stderr) == bool(said)


def test_one_that_is_killed_has_the_code_of_its_signal() -> None:
    with started(__name__, "hangs") as process:
        assert psutil.pid_exists(process.pid)
        process.kill()
        assert process.wait(30.0).returncode == -signal.SIGKILL
    assert run(__name__, "exits").returncode == 7


def test_one_that_takes_too_long_is_ended_and_the_next_call_starts_anew() -> None:
    pids = []
    with pytest.raises(TimeoutError, match="no reply for 0.2 s"), started(__name__, "hangs") as process:
        pids.append(process.pid)
        process.wait(0.2)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pids[0]) and psutil.Process(pids[0]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert run(__name__, "exits").returncode == 7
