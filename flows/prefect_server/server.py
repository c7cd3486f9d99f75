"""The Prefect server of a run: the configured one, or our own, which ends with this process."""

import fcntl
import importlib
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from vantage.attempts.identity.child_python import python_environment
from vantage.attempts.launchers.local_process import last_line
from vantage.ledger.tracking import without_password
from vantage.schemas.safe_text import server_secrets, without_secrets
from vantage.storage.durable_files import make_folder, make_private, open_private
from vantage.storage.empty_databases import migrated_once
from vantage.storage.machine_cache import cache_root

LOOPBACK = "127.0.0.1"
OWN_SERVER = "own"
"""The name of the server that keeps its database in the workspace."""
ANSWER_SECONDS = 15.0
"""Seconds for a configured server to answer."""
START_SECONDS = 120.0
"""Seconds for our own server to start, which usually takes a few seconds."""
DELIVERY_SECONDS = 10.0

DISABLED_SERVICES = (
    "CANCELLATION_CLEANUP",
    "CLEANUP_RECONCILER",
    "DB_VACUUM",
    "EVENT_PERSISTER",
    "FOREMAN",
    "LATE_RUNS",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
    "SCHEDULER",
    "TRIGGERS",
)
"""Services for deployments and automations, which a server for one run does not need. The service that records task
runs stays enabled."""

WITHOUT_BLOCKS = {
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    # otherwise Prefect remembers that the blocks are registered
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}
"""Environment of a server that writes no types of blocks into a new database, which saves a sixth of its start: a run
uses none. A server that is started by hand on this database later writes them. The user's own values have priority."""

_LOGIN = "PREFECT_SERVER_API_AUTH_STRING"
"""The login of a server."""

_SERVER_PREFIXES = ("PREFECT_SERVER_", "PREFECT_API_DATABASE_")
"""Prefixes of a server's variables: users may set a database for our own server."""


class ServerUnavailable(Exception):
    """The Prefect server does not answer; the message contains its address and the remedy."""


@dataclass
class PrefectServer:
    """A Prefect server that is being found or started; created by ``start``."""

    workspace: Path
    ours: bool = False
    """Whether this process started it."""
    _url: str | None = None
    _error: Exception | None = None
    _process: subprocess.Popen[bytes] | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)
    _search: threading.Thread | None = None
    _environment_before: dict[str, str | None] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """Our own server's PREFECT_HOME: its database and log."""
        return self.workspace / "prefect"

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    def wait_ready(self) -> str:
        """Wait until the server answers, point this process's Prefect at it, and return its API's URL.

        Call it before making a Prefect client or running a flow.

        Raises:
            ServerUnavailable: none answers in time.
        """
        if self._search is not None:
            self._search.join()
        if self._error is not None:
            raise self._error
        assert self._url is not None, "found, or an error was raised"
        if self.ours and not self._environment_before:
            self._environment_before = _set_environment(
                {
                    "PREFECT_API_URL": self._url,
                    "PREFECT_HOME": str(self.home),
                    # Prefect makes this folder, and must not make a removed workspace again.
                    "PREFECT_LOCAL_STORAGE_PATH": str(cache_root() / "prefect"),
                    "NO_PROXY": _with_loopback(os.environ.get("NO_PROXY")),
                    "no_proxy": _with_loopback(os.environ.get("no_proxy")),
                }
            )
        return self._url

    def stop(self) -> None:
        """Stop our own server and restore the environment; a configured server keeps running."""
        self._stopping.set()
        if self._search is not None:
            self._search.join()
        if self._process is not None:
            _flush_prefect_queues()
            end_process(self._process)
            self._process = None
        if self._environment_before:
            _set_environment(self._environment_before)
            self._environment_before = {}

    def _find(self, configured: str | None) -> None:
        try:
            if configured is not None:
                _wait_for_configured(configured, self._stopping)
            self._url = configured or self._start_own()
        except Exception as error:  # raised again in the thread that waits for the server
            self._error = error

    def _start_own(self) -> str:
        """Start a server and wait until it answers.

        A file lock prevents two runs of one workspace from migrating its database at the same time. Running servers
        share the database, as SQLite allows.
        """
        self.ours = True
        make_folder(self.home)
        with (self.home / "starting.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with new_database(self.home):
                return self._start_on_a_free_port()

    def _start_on_a_free_port(self) -> str:
        for _ in range(3):
            port = free_port()
            begin = self.log.stat().st_size if self.log.exists() else 0  # earlier servers wrote to it, too
            self._process = _server_process(self.home, port, self.log)
            if self._answers(f"http://{LOOPBACK}:{port}/api"):
                return f"http://{LOOPBACK}:{port}/api"
            end_process(self._process)
            if "already in use" not in self.log.read_text(errors="replace")[-4096:]:
                break
        raise ServerUnavailable(
            f"the Prefect server that vantage starts did not come up: {last_line(self.log, begin=begin)} ({self.log}); "
            "or name a running server in PREFECT_API_URL"
        )

    def _answers(self, url: str) -> bool:
        assert self._process is not None, "started just before"
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not self._stopping.is_set() and self._process.poll() is None:
            if is_healthy(url):
                return True
            time.sleep(0.1)
        return False


def start(workspace: Path) -> PrefectServer:
    """Look for the configured server, or start our own, in the background.

    Prefect's client is imported before that: Prefect cannot be imported in two threads at the same time.
    """
    server = PrefectServer(workspace=workspace.resolve())
    try:
        configured = configured_url()
        if configured is not None:
            importlib.import_module("prefect.client.orchestration")
    except Exception as error:
        # Prefect refuses a setting: `wait_ready` raises the error once the run is open
        server._error = error
        return server
    server._search = threading.Thread(
        target=server._find, args=(configured,), name="prefect-server", daemon=True
    )
    server._search.start()
    return server


@contextmanager
def prefect_server(workspace: Path) -> Iterator[str]:
    """Yield the API's URL of a Prefect server that answers for the body of the ``with``.

    Raises:
        ServerUnavailable: none answers in time.
    """
    server = start(workspace)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def configured_url() -> str | None:
    """Return the API's URL from the environment or from Prefect's profile; None if neither names one."""
    url = os.environ.get("PREFECT_API_URL")
    if url:
        return url
    from prefect.settings import get_current_settings  # importing it takes most of a second

    return get_current_settings().api.url


def server_name(workspace: Path) -> str:
    """Return the database of flow runs that this process uses: ``own`` for the workspace's, else the configured address.

    Our own server has a different port each time, and users may start it too, with the command that a run prints.
    """
    configured = configured_url()
    if configured is None or os.environ.get("PREFECT_HOME") == str(workspace.resolve() / "prefect"):
        return OWN_SERVER
    return without_password(configured)


def is_healthy(url: str) -> bool:
    """Return whether a server answers; asked without a proxy, and with the certificates that Prefect's client trusts."""
    scheme, _, address = url.partition("://")
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if scheme == "https":
            trusted = ssl.create_default_context(cafile=os.environ.get("PREFECT_API_SSL_CERT_FILE") or None)
            handlers.append(urllib.request.HTTPSHandler(context=trusted))
        direct = urllib.request.build_opener(*handlers)
        with direct.open(f"{scheme}://{address.rpartition('@')[2]}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def new_database(home: Path) -> Iterator[None]:
    """Prepare a new database: the body starts a server at ``home`` and waits until it answers. Kept tables are not made
    again."""
    database = home / "prefect.db"
    make_private(database)
    with migrated_once(f"prefect-{version('prefect')}.db", database):
        yield


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _wait_for_configured(url: str, stopping: threading.Event) -> None:
    """Poll with Prefect's client and its authentication until the server answers."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    deadline = time.monotonic() + ANSWER_SECONDS
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        while (refusal := client.api_healthcheck()) is not None and not stopping.is_set():
            if time.monotonic() >= deadline:
                raise ServerUnavailable(
                    without_secrets(
                        f"PREFECT_API_URL={url} does not answer within {ANSWER_SECONDS:g} seconds ({refusal}); start "
                        "that server, correct the address, or unset it and vantage starts a server of its own"
                    )
                )
            stopping.wait(0.5)


def _server_process(home: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Return a Prefect server on ``port`` that ends with this process (``vantage.flows.prefect_server.tied_process``)."""
    left_out = [name for name in server_secrets(os.environ) if not name.startswith(_SERVER_PREFIXES)]
    if os.environ.get(_LOGIN) != os.environ.get("PREFECT_API_AUTH_STRING"):
        left_out.append(_LOGIN)  # the login of another server: with it, our server would refuse this run
    environment = {
        **WITHOUT_BLOCKS,
        **{name: value for name, value in os.environ.items() if name not in left_out},
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_API_HOST": LOOPBACK,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{LOOPBACK}:{port}",
        "DO_NOT_TRACK": "1",
        **{f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in DISABLED_SERVICES},
        **python_environment(),
    }
    command = [
        sys.executable,
        "-m",
        "vantage.flows.prefect_server.tied_process",
        "uvicorn",
        "vantage.flows.prefect_server.app:create_guarded_app",
        "--factory",
    ]
    with open(log, "ab", opener=open_private) as output:
        return subprocess.Popen(
            [*command, "--host", LOOPBACK, "--port", str(port), "--log-level", "warning"],
            stdin=subprocess.PIPE,  # the server ends when this pipe closes
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=home,  # this folder has no .env or prefect.toml of the user
            umask=0o077,  # only their owner can read its files
            start_new_session=True,  # without Ctrl-C: the server records how the run ends
        )


def _flush_prefect_queues() -> None:
    """Let Prefect's client send its queued events and log lines, such as the last task's state."""
    if "prefect.events.worker" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    def drain() -> None:
        EventsWorker.drain_all(timeout=DELIVERY_SECONDS)
        APILogWorker.drain_all(timeout=DELIVERY_SECONDS)

    # In a new thread: with a running event loop, they would return a coroutine instead.
    thread = threading.Thread(target=drain)
    thread.start()
    thread.join()


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process of ``vantage.flows.prefect_server.tied_process``, and wait for it."""
    assert process.stdin is not None, "opened as a pipe"
    process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _with_loopback(hosts: str | None) -> str:
    return ",".join(dict.fromkeys([*filter(None, (hosts or "").split(",")), LOOPBACK, "localhost"]))


def _set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set (or with None remove) variables, make Prefect read them, and return their earlier values."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
    return before
