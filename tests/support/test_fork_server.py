"""A forked process has the arguments, environment, files, folder and parent of one that ``subprocess`` starts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import fork_server
from tests.support.fork_server import ROOT, Forked, ForkServer
from tests.support.stand_in import ADDRESS
from vantage.flows.prefect_server.server import end_process

TIED = "vantage.flows.prefect_server.tied_process"
SHOWS = """
import json, os, sys, threading, warnings
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
    "threads": threading.active_count(),
}))
print("to the other stream", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Yield a server that has loaded next to nothing."""
    server = ForkServer("tests.support.packages")
    yield server
    close(server)


@pytest.fixture(scope="module")
def flows() -> Iterator[ForkServer]:
    """Yield a server that has loaded no more than Prefect, and forks children."""
    server = ForkServer("prefect.logging.configuration", runs_flows=True)
    yield server
    close(server)


def close(server: ForkServer) -> None:
    if server._connection is not None and server.process is not None:  # otherwise no test has used the server
        server._connection.close()
        server.process.wait(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text("NAME = 'of this folder'")
    (tmp_path / "shown.py").write_text(SHOWS)
    return tmp_path


def started(popen: Callable[..., Any], words: list[str], folder: Path, **options: Any) -> tuple[Any, ...]:
    """Return errors, output and exit code of Python with these words."""
    environment = {**os.environ, "GIVEN": "here", "PREFECT_API_URL": "http://127.0.0.1:1/api"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "PYTHONWARNINGS": "ignore"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with popen(
        [sys.executable, *words], env=environment, cwd=folder, text=True, **streams, **options
    ) as process:
        return (*reversed(process.communicate("asked", timeout=60)), process.returncode)


@pytest.mark.parametrize("options", [{}, {"start_new_session": True, "umask": 0o27}, {"process_group": 0}])
def test_it_is_what_subprocess_starts(server: ForkServer, folder: Path, options: dict[str, Any]) -> None:
    """A forked process has what ``subprocess`` would give it."""
    for words in (["-c", SHOWS, "a b", "--c"], ["-m", "shown", "a b"], [str(folder / "shown.py"), "a b"]):
        errors, printed, code = started(subprocess.Popen, words, folder, **options)
        shown = json.loads(printed)
        assert (code, errors, shown["parent"]) == (7, "to the other stream\n", os.getpid())
        assert shown["given"] == ["here", "of this folder"]
        assert started(server.popen, words, folder, **options) == (errors, printed, code)


@pytest.mark.parametrize(
    "code",
    ["1 / 0", "raise SystemExit", "raise SystemExit('why')", "import os; os._exit(3)", "print(end='x')"],
)
def test_it_ends_as_that_does(server: ForkServer, folder: Path, code: str) -> None:
    """A forked process ends with the code with which the started one ends."""
    errors, printed, returned = started(subprocess.Popen, ["-c", code], folder)
    same = started(server.popen, ["-c", code], folder)
    assert same[1:] == (printed, returned)
    assert same[0].splitlines()[-1:] == errors.splitlines()[-1:]


def test_one_that_is_killed_has_the_code_of_its_signal_and_leaves_nothing(
    server: ForkServer, folder: Path
) -> None:
    started(server.popen, ["-c", ""], folder)
    before = psutil.Process().children(recursive=True)
    process = server.popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    assert process.pid in {each.pid for each in psutil.Process().children()}
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert psutil.Process().children(recursive=True) == before


def main() -> None:
    """Show what has come, and wait or end as it is asked."""
    print(os.getpid(), os.getpgid(0), os.getcwd(), os.environ.get("GIVEN"), sys.stdin.read(), flush=True)
    print(*sys.argv[1:], file=sys.stderr, flush=True)
    if sys.argv[1] == "waits":
        time.sleep(600)
    sys.exit(7)


def test_a_main_is_called_with_what_is_loaded_and_with_no_variable_of_another_call(
    server: ForkServer,
) -> None:
    ended = server.run_main(__name__, "shows", "a b", environment={"GIVEN": "here"})
    assert (ended.returncode, ended.stderr) == (7, "shows a b\n")
    assert ended.stdout.split()[2:] == [str(ROOT), "here"]
    assert server.run_main(__name__, "shows").stdout.split()[-1] == "None"
    code = "import sys; print('tests.support.packages' in sys.modules)"
    assert server.run([sys.executable, "-c", code], timeout=60, cwd=ROOT).stdout == "True\n"


def test_one_that_takes_too_long_is_ended_with_all_that_it_has_started(
    server: ForkServer, tmp_path: Path
) -> None:
    code = "import os, sys, time; os.fork(); open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        server.run([sys.executable, "-c", code, str(tmp_path / "pids")], timeout=1.0)
    pids = [int(each) for each in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.run_main(__name__, "shows").returncode == 7


def test_random_numbers_are_its_own() -> None:
    server = ForkServer("numpy.random")
    command = [sys.executable, "-c", "import random, numpy; print(random.random(), numpy.random.random())"]
    drawn = [server.run(command, timeout=60).stdout.split() for _ in range(2)]
    assert all(one != other for one, other in zip(*drawn, strict=True))
    close(server)


def test_modules_that_cannot_be_loaded_are_an_error() -> None:
    with pytest.raises(AssertionError, match="could not load its modules"):
        ForkServer("no_such_module").run_main(__name__, "shows")


def test_packages_are_those_to_which_its_path_leads(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "vantage").mkdir()
    (tmp_path / "vantage" / "__init__.py").write_text("NAME = 'a copy'")
    command = [sys.executable, "-c", "import vantage; print(getattr(vantage, 'NAME', 'ours'))"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    leads = {"PYTHONPATH": str(tmp_path)}
    for cwd, env, name in ((tmp_path, {}, "a copy"), (elsewhere, leads, "a copy"), (ROOT, leads, "ours")):
        expected = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        assert expected.stdout == f"{name}\n"
        assert server.run(command, timeout=60, cwd=cwd, env=env).stdout == expected.stdout


@pytest.fixture
def stand_in(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.Popen[str]]:
    """Start the stand-in program, which asks for a fork in place of ``main``."""
    monkeypatch.setenv(ADDRESS, str(tmp_path / "forks"))
    server.listen()

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-m", "tests.support.stand_in", __name__, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **streams)

    return start


def test_a_program_that_stands_for_another_has_its_own_files_and_variables_and_the_code_of_the_fork(
    stand_in: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    program = stand_in("shows", "a b", GIVEN="here")
    shown, errors = program.communicate("asked", timeout=60)
    pid, group, *rest = shown.split()
    assert rest == [str(tmp_path), "here", "asked"]
    assert pid == group != str(program.pid), "killing the group of one ends no other"
    assert (errors, program.returncode) == ("shows a b\n", 7)
    again, _ = stand_in("shows").communicate(timeout=60)
    assert again.split()[-1] == "None", "no variable of another program"


@pytest.mark.parametrize("killed", ["the program", "its fork"])
def test_each_ends_with_the_other(killed: str, stand_in: Callable[..., subprocess.Popen[str]]) -> None:
    program = stand_in("waits")
    assert program.stdin is not None and program.stdout is not None
    program.stdin.close()
    fork = psutil.Process(int(program.stdout.readline().split()[0]))
    os.kill(program.pid if killed == "the program" else fork.pid, signal.SIGKILL)
    assert program.wait(30) == (-signal.SIGKILL if killed == "the program" else 1)
    psutil.wait_procs([fork], timeout=30)
    assert not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_prefect_reads_its_environment(flows: ForkServer, folder: Path) -> None:
    code = "from prefect.settings import PREFECT_API_URL; print(PREFECT_API_URL.value())"
    assert started(flows.popen, ["-c", code], folder) == ("", "http://127.0.0.1:1/api\n", 0)


@pytest.mark.slow
def test_a_program_that_is_missing_and_settings_that_are_refused_are_told_by_python_itself(
    flows: ForkServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, _, code = started(flows.popen, ["-m", "no_such_module"], folder)
    assert code == 1 and "no_such_module" in errors
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "many")
    words = ["-c", "import sys; print('prefect' in sys.modules)"]
    assert started(flows.popen, words, folder) == ("", "False\n", 0), "an own process"


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


@pytest.mark.slow
def test_what_it_starts_is_forked_and_is_its_child(flows: ForkServer, folder: Path) -> None:
    (folder / "shown_parents.py").write_text(PARENTS)
    assert started(flows.popen, ["-c", STARTS], folder) == ("", "True\n 5\n", 0)
    assert started(subprocess.Popen, ["-c", STARTS], folder) == ("", "False\n 5\n", 0)


COMPUTES = """
import json, multiprocessing, os, psutil
from multiprocessing import forkserver
from tests.support.test_fork_server import show_own_parent

context = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["tests.support.own_session"])
receiving, sending = context.Pipe()
stage = context.Process(target=show_own_parent, args=(sending,))
stage.start()
parent, loaded, leads = receiving.recv()
stage.join()
print(json.dumps([
    psutil.Process(parent).ppid() == os.getpid(), forkserver._forkserver._forkserver_pid == parent, loaded, leads, stage.exitcode,
]))
"""


def show_own_parent(sending: Any) -> None:
    """Send what a process of multiprocessing's fork server sees, and end with a code."""
    loaded = "prefect.logging.configuration" in sys.modules
    sending.send((os.getppid(), loaded, os.getsid(0) == os.getppid()))
    sys.exit(4)


@pytest.mark.slow
def test_the_fork_server_of_its_stages_is_forked_too_and_is_its_child(
    flows: ForkServer, folder: Path
) -> None:
    errors, printed, code = started(flows.popen, ["-c", COMPUTES], folder)
    assert (errors, code) == ("", 0)
    assert json.loads(printed) == [True, True, True, True, 4]
    assert json.loads(started(subprocess.Popen, ["-c", COMPUTES], folder)[1]) == [True, True, False, True, 4]


@pytest.mark.slow
def test_a_server_that_is_tied_to_a_process_ends_with_its_input(flows: ForkServer, folder: Path) -> None:
    (folder / "waits.py").write_text("import time; print('ready', flush=True); time.sleep(600)")
    with flows.children():
        process = subprocess.Popen(
            [sys.executable, "-m", TIED, "waits"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        )
    assert isinstance(process, Forked)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        end_process(process)
        assert process.returncode == -signal.SIGTERM
    assert subprocess.Popen is fork_server._popen


def test_children_are_forked_until_the_last_has_left(server: ForkServer, flows: ForkServer) -> None:
    first, second = server.children(), flows.children()
    for entered in (first, second):
        entered.__enter__()
        assert subprocess.Popen is Forked
    assert Forked.server_of_children is flows
    second.__exit__(None, None, None)
    assert (subprocess.Popen, Forked.server_of_children) == (Forked, server)
    with flows.children():
        first.__exit__(None, None, None)  # as a thread does that entered before this one
        assert (subprocess.Popen, Forked.server_of_children) == (Forked, flows)
    assert subprocess.Popen is fork_server._popen


@pytest.mark.slow
def test_without_its_server_a_process_starts_others_as_ever(folder: Path) -> None:
    server = ForkServer()
    words = ["-c", "import psutil; print(psutil.Process().cmdline()[2])"]
    assert "main()" in started(server.popen, words, folder)[1]
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    assert started(server.popen, words, folder) == ("", f"{words[1]}\n", 0)
    assert "shows" in server.run_main(__name__, "shows").stderr
