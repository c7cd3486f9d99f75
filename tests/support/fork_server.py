"""Fork processes from one whose imports are done, in place of executing Python anew.

A ``ForkServer`` is a process that has loaded a list of modules. ``popen(COMMAND, …)`` of it is ``subprocess.Popen`` of
``[sys.executable, "-m", MODULE, …]``, ``[sys.executable, "-c", CODE, …]`` or ``[sys.executable, FILE, …]``: the process has the same
arguments, environment, files, folder and parent, and its modules are loaded when it begins. Where its path leads to another copy of our
packages, ours are forgotten. ``run`` and ``run_main`` wait for the end.

``WITH_PREFECT`` runs Vantage with fake stages, whose processes would take six CPU seconds to import Prefect and MLflow. What they start
in turn is forked too, where it is one of ``CHILDREN`` (a Prefect server, and what runs a flow for Prefect's worker), the command line again, or
multiprocessing's fork server, of which stages are forked.
``WITH_BOTH`` runs Vantage with its own stages (``tests.support.real_vantage``), and has loaded what they need, too.
``WITH_TORCH`` runs ranks, stages, and servers of models. It also forks for programs that somebody else starts (``stand_in``).

A new process is an orphan, which the one that asks adopts. A process of ``WITH_PREFECT`` has a fork server of its own: a child that was
forked before there was a thread.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from tests.support.stand_in import ADDRESS, command_of
from vantage.attempts.code_digest import module_digests
from vantage.attempts.launchers.quick_imports import quick_imports
from vantage.schemas.kinds import KINDS, STAGES

ROOT = Path(__file__).parents[2]
FUNCTION = "tests.support.fake_work.run_stage"
CHILDREN = (
    "vantage.flows.prefect_server.tied_process",
    "prefect.engine",
    # a worker starts this module; it becomes the engine of a flow run
    "prefect.runner._workspace_supervisor",
    "uvicorn",  # MLflow's server starts this module
)
COMMANDS = ("tests.support.fake_vantage", "tests.support.real_vantage")
"""Command lines that are forked as ``CHILDREN`` are."""

FORKS_STAGES = "from multiprocessing.forkserver import main"
"""How the command of multiprocessing's fork server begins."""

_ADOPTS = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux: descendants whose parent ends become children of this process."""
_MOST = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_popen = subprocess.Popen
_spawn = util.spawnv_passfds
_asking = threading.Lock()
_forking: list["ForkServer"] = []
"""Those that fork children of this process; the last one does it."""
_firsts: set[str] = set()
"""First entries of ``sys.path`` of earlier commands of this process and of those that it was forked from."""


class ForkServer:
    """A process that has loaded modules, and forks for this one; it starts with the first request."""

    def __init__(self, *modules: str, last: Sequence[str] = (), runs_flows: bool = False) -> None:
        """Name the modules; all that they import is loaded, too.

        Args:
            last: modules that need what ``quick_imports`` leaves out.
            runs_flows: stages are fake ones, Prefect reads the environment of each process, and its children are forked.
        """
        self.process: subprocess.Popen[bytes] | None = None
        self._modules, self._last, self._runs_flows = modules, tuple(last), runs_flows
        self._connection: socket.socket | None = None
        self._asks_for: int | None = None

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start the command as ``subprocess.Popen`` does."""
        return Forked(command, server=self, **options)

    def run(
        self, command: Sequence[str], *, timeout: float, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the command without input, and keep its output, as ``subprocess.run`` does. After an error nothing of its session is left."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(command, text=True, start_new_session=True, **streams, **options) as process:
            try:
                printed, errors = process.communicate(timeout=timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, printed, errors)

    def run_main(
        self, module: str, *arguments: str, environment: dict[str, str] | None = None, seconds: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """Call the module's ``main`` in a process with these arguments, and wait for its end.

        Args:
            environment: variables beside those of this process.
        """
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        return self.run(command_of(module, *arguments), timeout=seconds, cwd=ROOT, env=variables)

    @contextmanager
    def children(self) -> Iterator[None]:
        """Fork those of ``CHILDREN`` and ``COMMANDS`` that are started in the ``with``; threads may be in it at the same time, in any order."""
        with _asking:
            _forking.append(self)
            self._fork_children()
        try:
            yield
        finally:
            with _asking:
                _forking.remove(self)
                if _forking:
                    _forking[-1]._fork_children()
                else:
                    subprocess.Popen = _popen  # type: ignore[misc]

    def listen(self) -> None:
        """Fork for stand-ins of this process and of all that it starts."""
        with _asking, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            if not os.path.exists(os.environ[ADDRESS]):
                listening.bind(os.environ[ADDRESS])
                listening.listen(64)
                socket.send_fds(self._connected(), [b"listen"], [listening.fileno()])

    def fork(self, asked: dict[str, Any], standard: Sequence[int]) -> int:
        """Have a process forked; return the id of the new process, which is this one's child."""
        with _asking:
            connection = self._connected()
            _libc.prctl(_ADOPTS, 1)
            try:
                socket.send_fds(connection, [json.dumps(asked).encode()], standard)
                return int(connection.recv(64))
            finally:
                _libc.prctl(_ADOPTS, 0)

    def _connected(self) -> socket.socket:
        """Return the connection to it; start it if this process has none."""
        if self._connection is None or self._asks_for != os.getpid():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self.process = _popen(
                    [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                    start_new_session=True,
                )
            ours.send(json.dumps([self._modules, self._last, self._runs_flows]).encode())
            assert ours.recv(64), "a fork server could not load its modules"
            self._connection, self._asks_for = ours, os.getpid()
        return self._connection

    # -- in the process that forks, and in what it has forked

    def _load(self) -> None:
        if self._runs_flows:
            _begin_flows()
        with quick_imports():
            for name in self._modules:
                importlib.import_module(name)
        for name in self._last:
            importlib.import_module(name)
        for kind in KINDS.values():
            module_digests(kind.module)  # what is read here, no fork parses again
        gc.freeze()
        assert threading.active_count() == 1, "a fork has one thread"

    def _serve(self, owner: socket.socket) -> NoReturn:
        """Fork a process for each request of the owner and of stand-ins, until the owner has ended."""
        asking = [owner]
        while True:
            ready = select.select(asking, [], [])[0][0]
            connection = ready if ready is owner else ready.accept()[0]
            message, descriptors, _, _ = socket.recv_fds(connection, _MOST, 5)
            if not message:  # the process has ended
                if ready is owner:
                    os._exit(0)
                connection.close()
                continue
            if message == b"listen":
                asking.append(socket.socket(fileno=descriptors[0]))
                continue
            here, there = socket.socketpair()
            # the end of this process makes an orphan of the new one, which the asking process adopts
            between = os.fork()
            if between == 0:
                if os.fork() == 0:
                    for each in (*asking, here):
                        each.close()
                    self._become(json.loads(message), descriptors, there, connection)
                os._exit(0)
            os.waitpid(between, 0)
            there.close()
            with suppress(OSError):
                connection.send(here.recv(64))
            here.close()
            for descriptor in descriptors:
                os.close(descriptor)
            if connection is not owner:
                connection.close()

    def _become(
        self, asked: dict[str, Any], files: Sequence[int], server: socket.socket, stand_in: socket.socket
    ) -> NoReturn:
        """Become the process that was asked for, as soon as it has its group and its parent.

        Args:
            files: descriptors of its input, output and errors, and of the others that it gets.
            server: sends the process id on, and is closed when the parent is no more.
            stand_in: connection to the one that asks; it is closed if that is the parent.
        """
        if asked["session"]:
            os.setsid()
        elif asked["group"] not in (None, -1):
            os.setpgid(0, asked["group"])
        if asked["umask"] >= 0:
            os.umask(asked["umask"])
        with server:
            server.send(str(os.getpid()).encode())
            server.recv(1)
        others = asked.get("files", ())
        runs_flows = self._runs_flows and not others
        if runs_flows:
            self._begin_own_server(files)
        _take_files(files, (0, 1, 2, *others))
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
        os.chdir(asked["folder"])
        if stand_in.fileno() >= 0:
            threading.Thread(target=_end_with, args=(stand_in,), daemon=True).start()
        if "numpy.random" in sys.modules:  # each fork gets other random numbers from Python
            sys.modules["numpy.random"].seed()
        command, environment = asked["command"], asked["environment"]
        while True:
            os.environ.clear()
            os.environ.update(environment)
            try:
                if runs_flows:
                    _read_settings(own=not _is_child(command))
            except Exception:  # the process must report warnings itself
                os.execve(command[0], command, environment)
            try:
                _end(_exit_code(partial(_execute, command)), stand_in)
            except _Executed as other:
                command, environment = other.args

    def _begin_own_server(self, standard: Sequence[int]) -> None:
        """Fork the server of this process, which has no thread yet, and have its children forked."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            for descriptor in (ours.detach(), *standard):
                os.close(descriptor)
            self._serve(theirs)
        theirs.close()
        self._connection, self._asks_for = ours, os.getpid()
        _forking.append(self)
        self._fork_children()
        os.execvpe = _become_another  # type: ignore[assignment]
        util.spawnv_passfds = self._spawn  # type: ignore[assignment]

    def _spawn(self, path: bytes, command: list[Any], files: Sequence[int]) -> int:
        """Fork when multiprocessing starts its fork server, and execute its other helper."""
        if not command[-1].startswith(FORKS_STAGES):
            return _spawn(path, command, files)
        asked = {
            "command": [sys.executable, "-c", command[-1]],
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "umask": -1,
            "session": False,
            "group": None,
            "files": list(files),
        }
        return self.fork(asked, [0, 1, 2, *files])

    def _fork_children(self) -> None:
        Forked.server_of_children = self
        subprocess.Popen = Forked  # type: ignore[misc]


_OF_RUNS = (
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
_OF_STAGES = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    *(kind.module for kind in STAGES.values()),
    "vantage.schemas.tables",
    *("torch.distributed", "vantage.tasks.stages", "vantage.tasks.training.attempt"),
)
WITH_PREFECT = ForkServer(*_OF_RUNS, runs_flows=True)
WITH_BOTH = ForkServer(*_OF_RUNS, *_OF_STAGES, last=("scipy.stats",), runs_flows=True)
WITH_TORCH = ForkServer(
    "tests.support.fake_vllm_server",
    "tests.tasks.stages_on_ranks",
    *_OF_STAGES,
    # What Ray imports. Ray itself reads the environment, which each of its workers has of its own, as soon as it is loaded.
    *("pyarrow.dataset", "pandas", "google.protobuf.message", "jsonschema", "requests"),
    # Stages import these when they first need them: intervals of what was measured, adapters and 8-bit states.
    last=("scipy.stats", "peft"),
)


class Forked(_popen):  # type: ignore[type-arg]
    """A process as ``subprocess.Popen`` has it, which was forked instead of executed."""

    server_of_children: ForkServer
    """The fork server for those of ``CHILDREN`` and ``COMMANDS`` that are started without a ``server``."""

    def __init__(self, args: Any, *values: Any, server: ForkServer | None = None, **options: Any) -> None:
        """Start the command as ``subprocess.Popen`` does; ``server`` forks it."""
        self._server = server
        super().__init__(args, *values, **options)

    def _execute_child(self, *values: Any) -> None:
        given = inspect.signature(_popen._execute_child).bind(self, *values).arguments  # type: ignore[attr-defined]
        server = self._server_of(given["args"])
        if server is None or given["shell"] or given["preexec_fn"] or given["pass_fds"]:
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
            self.pid = server.fork(
                asked, [number if own == -1 else own for number, own in enumerate(standard)]
            )
        except (OSError, ValueError):  # a test has ended all children of this process, and so the server
            super()._execute_child(*values)  # type: ignore[misc]
            return
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    def _server_of(self, command: object) -> ForkServer | None:
        if not isinstance(command, list | tuple) or len(command) < 2 or command[0] != sys.executable:
            return None
        if self._server is None:
            return self.server_of_children if _is_child(command, *COMMANDS) else None
        return None if str(command[1]).startswith("-") and command[1] not in ("-m", "-c") else self._server


def _is_child(command: Sequence[str], *others: str) -> bool:
    return command[1] == "-m" and command[2] in (*CHILDREN, *others)


# -- in the process that forks, and in what it has forked


def main() -> None:
    """Load the modules, then fork for the process that has started this one."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    modules, last, runs_flows = json.loads(owner.recv(_MOST))
    server = ForkServer(*modules, last=last, runs_flows=runs_flows)
    server._load()
    owner.send(b"loaded")
    server._serve(owner)


def _begin_flows() -> None:
    """Set what Vantage does before it imports Prefect and MLflow, and nothing that a test has set for them; stages are fake."""
    from tests.support.faked_stages import compute_with
    from tests.support.unsent import VARIABLE

    for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_", VARIABLE))]:
        del os.environ[name]
    compute_with(FUNCTION)
    os.environ.update(_own_settings())


def _own_settings() -> dict[str, str]:
    """Return what Vantage sets for Prefect and MLflow before it imports them."""
    from vantage.flows.execution import QUIET, SETTINGS
    from vantage.ledger.tracking import MLFLOW_ENVIRONMENT

    return {**SETTINGS, **QUIET, **MLFLOW_ENVIRONMENT}


def _take_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the files these numbers, whatever else has them."""
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _end_with(stand_in: socket.socket) -> None:
    """End this process when its stand-in ends."""
    stand_in.recv(1)
    os._exit(1)


class _Executed(BaseException):
    """Another command, and its environment, for this process to go on with, as after ``exec``."""


def _become_another(file: str, command: list[str], environment: dict[str, str]) -> NoReturn:
    if file != sys.executable:
        os.execve(shutil.which(file) or file, command, environment)
    raise _Executed(command, environment)


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
    _forget_packages()
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


def _forget_packages() -> None:
    """Unload our packages if a copy of them comes first on ``sys.path``."""
    found = next((entry for entry in sys.path if Path(entry, "vantage", "__init__.py").exists()), ROOT)
    if not os.path.samefile(found or os.curdir, ROOT):
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vantage", "tests")]:
            del sys.modules[name]
        importlib.invalidate_caches()


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


def _end(code: int, stand_in: socket.socket) -> NoReturn:
    """End as Python does, but for taking apart a million objects."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    with suppress(OSError):
        stand_in.send(bytes([code & 0xFF]))
    os._exit(code)
