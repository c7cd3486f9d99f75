"""Processes forked from one whose imports are done, for tests that are not about how a process starts.

``popen(COMMAND, …)`` is ``subprocess.Popen`` of ``[sys.executable, "-m", MODULE, …]`` or ``[sys.executable, "-c", CODE, …]``: the
process has the same arguments, environment, files, folder and parent. It has loaded Vantage with fake stages, Prefect and
MLflow when it begins; a process of its own takes six CPU seconds to import them. What such a process starts in turn
is forked too, where it is one of ``CHILDREN``: a Prefect server, and what runs a flow for Prefect's worker.

Each process that may fork this way has a helper: a child that was forked before there was a thread. It forks once more for
each process, and lets the parent adopt the new one.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from tests.support.unsent import VARIABLE

ROOT = Path(__file__).parents[2]
FUNCTION = "tests.support.fake_work.run_stage"
LOADED = (
    "alembic.config",
    "anyio._backends._asyncio",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "multiprocessing.popen_forkserver",
    "prefect.engine",
    "prefect.events.clients",
    "prefect.flow_engine",
    "prefect.runner._workspace_starter",
    "prefect.server.api.server",
    "prefect.task_engine",
    "prefect.utilities.visualization",
    "tests.support.fake_work",
    "tests.support.orchestrated",
    "uvicorn.main",
    "vantage.cli.main",
    "vantage.flows.execution",
    "vantage.flows.pipeline",
    "vantage.flows.pools.deployments",
    "vantage.flows.prefect_server.app",
    "vantage.flows.reused_runs",
    "vantage.flows.starting",
    "vantage.flows.sweeps.sweep",
    "vantage.ledger.to_mlflow.delivery",
    "vantage.review.audit.target",
)
"""Modules that are loaded before anything is asked for, with all that they import."""
CHILDREN = (
    "vantage.flows.prefect_server.tied_process",
    "prefect.engine",
    "prefect.runner._workspace_supervisor",  # what a worker starts; it becomes the engine of a flow run
    "uvicorn",  # what MLflow's server starts
)

_ADOPTS = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux: descendants whose parent ends become children of this process."""
_MOST = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_popen = subprocess.Popen
_asking = threading.Lock()
_helper: socket.socket | None = None
_helper_of: int | None = None
_first: subprocess.Popen[bytes] | None = None
"""The helper of the tests' process, which forks until the connection to it is closed."""
_firsts: set[str] = set()
"""First entries of ``sys.path`` of earlier commands of this process and of those that it was forked from."""


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start the command as ``subprocess.Popen`` does."""
    return Forked(command, **options)


def run(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command and keep its output, as ``subprocess.run`` does."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(command, text=True, **streams, **options) as process:
        try:
            printed, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, printed, errors)


@contextmanager
def children() -> Iterator[None]:
    """Fork those of ``CHILDREN`` that are started in the ``with``."""
    before = subprocess.Popen
    subprocess.Popen = _ForkedChild  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


class Forked(_popen):  # type: ignore[type-arg]
    """A process as ``subprocess.Popen`` has it, which was forked instead of executed."""

    def _forks(self, command: object) -> bool:
        if not isinstance(command, list | tuple):
            return False
        return command[0] == sys.executable and command[1] in ("-m", "-c")

    def _execute_child(self, *values: Any) -> None:
        given = inspect.signature(_popen._execute_child).bind(self, *values).arguments  # type: ignore[attr-defined]
        if not self._forks(given["args"]) or given["shell"] or given["preexec_fn"] or given["pass_fds"]:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        standard = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        environment = os.environ if given["env"] is None else given["env"]
        asked = {
            "command": [os.fspath(word) for word in given["args"]],
            "folder": os.fspath(given["cwd"] or Path.cwd()),
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            "umask": given["umask"],
            "session": bool(given["start_new_session"]),
            "group": given["process_group"],
        }
        try:
            self.pid = _fork(asked, [number if own == -1 else own for number, own in enumerate(standard)])
        except (OSError, ValueError):  # a test has ended all children of this process, and so its helper
            super()._execute_child(*values)  # type: ignore[misc]
            return
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


class _ForkedChild(Forked):
    def _forks(self, command: object) -> bool:
        return super()._forks(command) and cast("Sequence[str]", command)[2] in CHILDREN


def _fork(asked: dict[str, Any], standard: Sequence[int]) -> int:
    """Have the helper fork; return the id of the new process, which is this one's child."""
    with _asking:
        helper = _own_helper()
        _libc.prctl(_ADOPTS, 1)
        try:
            socket.send_fds(helper, [json.dumps(asked).encode()], standard)
            return int(helper.recv(64))
        finally:
            _libc.prctl(_ADOPTS, 0)


def _own_helper() -> socket.socket:
    """Return the connection to this process's helper; that of the tests loads the modules first."""
    global _helper, _helper_of, _first
    if _helper is None or _helper_of != os.getpid():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            _first = _popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno()), *LOADED],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**_without(os.environ, "PREFECT_", "MLFLOW_", VARIABLE), "PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        _helper, _helper_of = ours, os.getpid()
        ours.recv(64)
    return _helper


def _without(environment: "os._Environ[str]", *prefixes: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}


# -- in the helpers, and in what they fork


def main() -> None:
    """Load the modules, then fork for the tests until they end."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    from tests.support.faked_stages import compute_with

    compute_with(FUNCTION)
    os.environ.update(_own_settings())
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork has one thread"
    gc.freeze()
    asked.send(b"loaded")
    _serve(asked)


def _own_settings() -> dict[str, str]:
    """Return what Vantage sets for Prefect and MLflow before it imports them."""
    from vantage.flows.execution import QUIET, SETTINGS
    from vantage.ledger.tracking import MLFLOW_ENVIRONMENT

    return {**SETTINGS, **QUIET, **MLFLOW_ENVIRONMENT}


def _serve(asked: socket.socket) -> NoReturn:
    """Fork a process for each request, until the one that asks has ended."""
    while True:
        message, standard, _, _ = socket.recv_fds(asked, _MOST, 3)
        if not message:
            os._exit(0)
        told, telling = os.pipe()
        between = os.fork()  # whose end makes an orphan of the process, for the one that asks to adopt
        if between == 0:
            process = os.fork()
            if process == 0:
                for descriptor in (asked.detach(), told, telling):
                    os.close(descriptor)
                _become(json.loads(message), standard)
            os.write(telling, str(process).encode())
            os._exit(0)
        os.waitpid(between, 0)
        asked.send(os.read(told, 64))
        for descriptor in (told, telling, *standard):
            os.close(descriptor)


def _become(asked: dict[str, Any], standard: Sequence[int]) -> NoReturn:
    """Be the process that was asked for."""
    if asked["session"]:
        os.setsid()
    elif asked["group"] not in (None, -1):
        os.setpgid(0, asked["group"])
    if asked["umask"] >= 0:
        os.umask(asked["umask"])
    _begin_helper(standard)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    os.chdir(asked["folder"])
    subprocess.Popen = _ForkedChild  # type: ignore[misc]
    os.execvpe = _become_another  # type: ignore[assignment]
    gc.enable()
    command, environment = asked["command"], asked["environment"]
    while True:
        os.environ.clear()
        os.environ.update(environment)
        try:
            _read_settings(own=command[2] not in CHILDREN)
        except Exception:  # the process must tell of them itself
            os.execve(command[0], command, environment)
        try:
            _end(_exit_code(partial(_execute, command)))
        except _Executed as other:
            command, environment = other.args


class _Executed(BaseException):
    """Another command, and its environment, for this process to go on with, as after ``exec``."""


def _become_another(file: str, command: list[str], environment: dict[str, str]) -> NoReturn:
    if file != sys.executable:
        os.execve(shutil.which(file) or file, command, environment)
    raise _Executed(command, environment)


def _begin_helper(standard: Sequence[int]) -> None:
    """Fork the helper of this process, which has no thread yet."""
    global _helper, _helper_of
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for descriptor in (ours.detach(), *standard):
            os.close(descriptor)
        _serve(theirs)
    theirs.close()
    _helper, _helper_of = ours, os.getpid()


def _read_settings(*, own: bool) -> None:
    """Have Prefect read the environment; with ``own`` as Vantage's commands do, which set theirs before they import it."""
    from prefect.context import refresh_global_settings_context
    from prefect.logging import configuration

    given = dict(os.environ)
    if own:
        for name, value in _own_settings().items():
            os.environ.setdefault(name, value)
    refresh_global_settings_context()
    configuration.PROCESS_LOGGING_CONFIG.clear()
    configuration.setup_logging()
    os.environ.clear()
    os.environ.update(given)


def _execute(command: Sequence[str]) -> None:
    """Do what Python does with the command."""
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    own = {"", str(ROOT), *added, *_firsts}
    how, *words = command[1:]
    first = {"-m": str(Path.cwd()), "-c": ""}.get(how, str(Path(how).parent))
    _firsts.add(first)
    sys.path[:] = [first, *added, *(entry for entry in sys.path if entry not in own)]
    warnings._processoptions(filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")))  # type: ignore[attr-defined]
    if any((Path(entry) / "sitecustomize.py").exists() for entry in added):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if how == "-c":
        sys.argv = ["-c", *words[1:]]
        program = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), program.__dict__)
    elif how == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [how, *words]
        runpy.run_path(how, run_name="__main__")


def _exit_code(execute: Callable[[], None]) -> int:
    try:
        execute()
    except _Executed:
        raise
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End as Python does, but for taking apart a million objects."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
