"""A forked process is what ``subprocess`` starts: with its arguments, environment, files, folder and parent."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import forked
from vantage.flows.prefect_server.server import end_process

pytestmark = pytest.mark.slow

TIED = "vantage.flows.prefect_server.tied_process"
SHOWS = """
import json, os, sys, warnings
import sitecustomize
print(json.dumps({
    "arguments": sys.argv,
    "folder": [os.getcwd(), sys.path[0]],
    "given": [os.environ.get("GIVEN"), sitecustomize.NAME],
    "parent": os.getppid(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "mask": os.umask(0o77),
    "main": [__name__, sys.modules["__main__"].__spec__ and sys.modules["__main__"].__spec__.name],
    "read": sys.stdin.read(),
    "quiet": warnings.filters[0][0],
}))
print("to the other stream", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module", autouse=True)
def own_helper() -> Iterator[None]:
    """Use a helper of these tests, which loads no more than Prefect."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forked, "_helper", None)
        patched.setattr(forked, "LOADED", ("prefect.logging.configuration",))
        yield
        assert forked._helper is not None and forked._first is not None
        forked._helper.close()
        forked._first.wait(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text("NAME = 'of this folder'")
    (tmp_path / "shown.py").write_text(SHOWS)
    return tmp_path


def started(popen: Callable[..., Any], words: list[str], folder: Path, **options: Any) -> tuple[Any, ...]:
    """(Exit code, output, errors) of Python with these words."""
    environment = {**os.environ, "GIVEN": "here", "PREFECT_API_URL": "http://127.0.0.1:1/api"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(folder), str(forked.ROOT)]),
        "PYTHONWARNINGS": "ignore",
    }
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with popen(
        [sys.executable, *words], env=environment, cwd=folder, text=True, **streams, **options
    ) as process:
        return (*reversed(process.communicate("asked", timeout=60)), process.returncode)


@pytest.mark.parametrize("options", [{}, {"start_new_session": True, "umask": 0o27}, {"process_group": 0}])
def test_it_is_what_subprocess_starts(folder: Path, options: dict[str, Any]) -> None:
    for words in (["-c", SHOWS, "a b", "--c"], ["-m", "shown", "a b"]):
        errors, printed, code = started(subprocess.Popen, words, folder, **options)
        shown = json.loads(printed)
        assert (code, errors, shown["parent"]) == (7, "to the other stream\n", os.getpid())
        assert shown["given"] == ["here", "of this folder"]
        assert started(forked.popen, words, folder, **options) == (errors, printed, code)


@pytest.mark.parametrize(
    "code",
    ["1 / 0", "raise SystemExit", "raise SystemExit('why')", "import os; os._exit(3)", "print(end='x')"],
)
def test_it_ends_as_that_does(folder: Path, code: str) -> None:
    errors, printed, returned = started(subprocess.Popen, ["-c", code], folder)
    same = started(forked.popen, ["-c", code], folder)
    assert same[1:] == (printed, returned)
    assert same[0].splitlines()[-1:] == errors.splitlines()[-1:]


def test_one_that_is_killed_has_the_code_of_its_signal_and_leaves_nothing(folder: Path) -> None:
    started(forked.popen, ["-c", ""], folder)
    before = psutil.Process().children(recursive=True)
    process = forked.popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    assert process.pid in {each.pid for each in psutil.Process().children()}
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert psutil.Process().children(recursive=True) == before


def test_prefect_reads_its_environment(folder: Path) -> None:
    code = "from prefect.settings import PREFECT_API_URL; print(PREFECT_API_URL.value())"
    assert started(forked.popen, ["-c", code], folder) == ("", "http://127.0.0.1:1/api\n", 0)


def test_a_program_that_is_missing_and_settings_that_are_refused_are_told_by_python_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, _, code = started(forked.popen, ["-m", "no_such_module"], folder)
    assert code == 1 and "no_such_module" in errors
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "many")
    words = ["-c", "import sys; print('prefect' in sys.modules)"]
    assert started(forked.popen, words, folder) == ("", "False\n", 0), "an own process"


STARTS = f"""
import subprocess, sys
started = subprocess.Popen(
    [sys.executable, "-m", "{TIED}", "shown_parents"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(started.stdout.read(), started.wait())
"""
PARENTS = """
import os, psutil, sys
print(psutil.Process().cmdline()[1:3] == psutil.Process().parent().cmdline()[1:3])
sys.exit(5)
"""


def test_what_it_starts_is_forked_and_is_its_child(folder: Path) -> None:
    (folder / "shown_parents.py").write_text(PARENTS)
    assert started(forked.popen, ["-c", STARTS], folder) == ("", "True\n 5\n", 0)
    assert started(subprocess.Popen, ["-c", STARTS], folder) == ("", "False\n 5\n", 0)


def test_a_server_that_is_tied_to_a_process_ends_with_its_input(folder: Path) -> None:
    (folder / "waits.py").write_text("import time; print('ready', flush=True); time.sleep(600)")
    with forked.children():
        process = subprocess.Popen(
            [sys.executable, "-m", TIED, "waits"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(forked.ROOT)])},
        )
    assert isinstance(process, forked.Forked)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        end_process(process)
        assert process.returncode == -signal.SIGTERM
    assert not isinstance(subprocess.Popen, forked.Forked)


def test_without_its_helper_a_process_starts_others_as_ever(folder: Path) -> None:
    """The last test here: its helper does not come again."""
    words = ["-c", "import psutil; print(psutil.Process().cmdline()[2])"]
    assert "main()" in started(forked.popen, words, folder)[1]
    assert forked._first is not None
    forked._first.kill()
    forked._first.wait()
    assert started(forked.popen, words, folder) == ("", f"{words[1]}\n", 0)
