"""Start all three servers, or stop them; both can be repeated, whatever state the last call left."""

import base64
import fcntl
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.servers.failure import ServersFailure
from deploy.servers.mlflow_server import mlflow_server, write_auth_config
from deploy.servers.postgres import OwnPostgres, account, create_databases, data_folder
from deploy.servers.prefect_server import prefect_server
from deploy.servers.processes import OF_THE_CALLER, Server, last_lines, stop
from deploy.servers.settings import LOOPBACK, USER, Settings, free_port, is_free, write_private

OWN_POSTGRES_VARIABLE = "VANTAGE_POSTGRES_URL"
START_SECONDS = 600.0
"""Seconds for a server to answer; on a slow machine, the first start, which makes the tables, takes most of them."""
MAX_PORTS = 3
"""Number of ports that a server tries; another process may take a port between our check and the server's start."""
STRANGER_SECONDS = 20.0
"""Seconds that a server gets to end, or to accept our login, after its port gave a foreign answer."""
ACCEPTED = (401, 200)
"""HTTP statuses, without a login and with ours, of a server that refuses strangers and accepts us."""
PAGES = {"prefect": "/api/admin/version", "mlflow": f"/api/2.0/mlflow/users/get?username={USER}"}
"""Server → a path that needs a login."""


def say(text: str) -> None:
    """Print a message to the user; standard output is for the shell."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the folder if it is missing, and wait until no other call works in it."""
    # Others may traverse it if PostgreSQL runs as another user, who must reach its own folder. Nobody may list it.
    folder.mkdir(mode=0o711 if account() else 0o700, parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start_all(folder: Path) -> Settings:
    """Start the servers that do not run; returns addresses and logins.

    Raises:
        ServersFailure: a server does not come up, or does not accept our login.
    """
    settings = read_settings(folder)
    if settings.postgres_url is None:
        postgres = OwnPostgres(settings)
        started = postgres.ensure_running()
        _save(settings, folder)
        say(
            f"PostgreSQL {'started' if started else 'runs already'}: {LOOPBACK}:{settings.ports['postgres']}, data in {postgres.data}"
        )
    create_databases(settings.server_url)
    write_auth_config(settings, folder)
    for name in PAGES:
        _start(settings, name, folder)
    for name in PAGES:
        _wait_until_ready(settings, name, folder)
    return settings


def remember_addresses(folder: Path, **addresses: str | None) -> None:
    """Store the addresses at which a proxy serves the servers; None leaves one unchanged, an empty one is removed.

    Raises:
        ServersFailure: an address cannot be used.
    """
    if all(each is None for each in addresses.values()):
        return
    settings = read_settings(folder)
    for server, address in addresses.items():
        if address == "":
            settings.public.pop(server, None)
        elif address is not None:
            if not re.fullmatch(r"https://[A-Za-z0-9.-]+(:[0-9]{1,5})?", address):
                raise ServersFailure(
                    f"--{server}-address={address} is not https://NAME or https://NAME:PORT; a server that other machines "
                    "reach needs TLS and a name of its own, without a path"
                )
            settings.public[server] = address
    _save(settings, folder)


def write_environments(settings: Settings, folder: Path) -> None:
    """Write the files with the lines for a shell: for this machine and, with public addresses, for others."""
    write_private(folder / "environment", settings.exports())
    elsewhere = folder / "environment.elsewhere"
    if settings.public:
        write_private(elsewhere, settings.exports(elsewhere=True))
    else:
        elsewhere.unlink(missing_ok=True)


def all_run(folder: Path) -> bool:
    """Return whether the main process of each server lives."""
    settings = read_settings(folder)
    ours = settings.postgres_url is None
    return (not ours or OwnPostgres(settings).runs()) and all(
        _server(settings, name, folder).runs() for name in ("prefect", "mlflow")
    )


def stop_all(folder: Path, *, delete: bool) -> None:
    """Stop the running servers, PostgreSQL last; with ``delete``, remove all their data, except in a PostgreSQL of the
    user.

    Raises:
        ServersFailure: PostgreSQL does not stop.
    """
    for name in ("mlflow", "prefect"):
        say(f"{name} {'stopped' if stop(folder, name) else 'does not run'}")
    if (folder / "settings.json").exists():
        settings = read_settings(folder)
        if settings.postgres_url is None:
            say(f"postgres {'stopped' if OwnPostgres(settings).stop() else 'does not run'}")
        if delete:
            shutil.rmtree(settings.postgres_folder, ignore_errors=True)
    if delete:
        shutil.rmtree(folder)
        say(f"{folder} deleted")


def read_settings(folder: Path) -> Settings:
    """Return the remembered settings, or new ones; an address in VANTAGE_POSTGRES_URL has priority.

    Raises:
        ServersFailure: the address in the variable cannot be used.
    """
    file = folder / "settings.json"
    settings = (
        Settings.model_validate_json(file.read_text())
        if file.exists()
        else Settings(postgres_folder=data_folder(folder))
    )
    url = os.environ.get(OWN_POSTGRES_VARIABLE)
    if url:
        if not re.fullmatch(r"postgresql://[^/?#\s]+", url):
            raise ServersFailure(
                f"{OWN_POSTGRES_VARIABLE} is not postgresql://USER:PASSWORD@HOST:PORT, without a database or options"
            )
        settings.postgres_url = url
    _save(settings, folder)
    return settings


def _save(settings: Settings, folder: Path) -> None:
    write_private(folder / "settings.json", settings.model_dump_json(indent=1))


def _server(settings: Settings, name: str, folder: Path) -> Server:
    environment = {key: os.environ[key] for key in OF_THE_CALLER if key in os.environ}  # logins are left out
    return {"prefect": prefect_server, "mlflow": mlflow_server}[name](settings, folder, environment)


def _start(settings: Settings, name: str, folder: Path) -> None:
    """Start a server that does not run properly, on another port if its own is taken; do not wait for it."""
    if _server(settings, name, folder).runs():
        return
    stop(folder, name)  # it runs with other settings, or without its main process
    if not is_free(settings.ports[name]):
        taken, settings.ports[name] = settings.ports[name], free_port()
        _save(settings, folder)
        say(f"port {taken} is taken: {name} gets {settings.ports[name]}")
    _server(settings, name, folder).start()


def _wait_until_ready(settings: Settings, name: str, folder: Path) -> None:
    """Wait until a server answers, and check that it refuses strangers and accepts us.

    A server gets another port if another process took its port during the start.
    """
    deadline = time.monotonic() + START_SECONDS
    for is_last in [False] * (MAX_PORTS - 1) + [True]:
        answers = _answers(settings, name, folder, deadline)
        if answers is not None or is_last or is_free(settings.ports[name]):
            break
        _start(settings, name, folder)
    server = _server(settings, name, folder)
    if answers is None:
        raise ServersFailure(f"the {name} server did not start: {last_lines(server.log)} ({server.log})")
    if answers != ACCEPTED:
        raise ServersFailure(
            f"the {name} server answers {answers[0]} without a login and {answers[1]} with ours (not 401 and 200): its database "
            f"may have been made with another password; delete the database, or the users in it ({server.log})"
        )
    say(f"{name} runs: {settings.local(name)}")


def _answers(settings: Settings, name: str, folder: Path, deadline: float) -> tuple[int, int] | None:
    """Wait for a server's HTTP statuses, without a login and with ours; None: it ended, or does not answer in time."""
    server = _server(settings, name, folder)
    page = settings.local(name) + PAGES[name]
    login = {"prefect": settings.prefect_password, "mlflow": settings.mlflow_password}[name]
    latest: tuple[int, int] | None = None
    while server.runs() and time.monotonic() < deadline:
        without, ours = _status(page), _status(page, password=login)
        if without is not None and ours is not None and max(without, ours) < 500:
            if latest is None and (without, ours) != ACCEPTED:
                # Perhaps another process took the port and answers: then ours is about to end.
                deadline = min(deadline, time.monotonic() + STRANGER_SECONDS)
            latest = without, ours
        if latest == ACCEPTED:
            break
        time.sleep(0.2)
    return latest if server.runs() else None


def _status(address: str, *, password: str | None = None) -> int | None:
    """Return the HTTP status of an address on this machine; None: no answer."""
    request = urllib.request.Request(address)
    if password is not None:
        login = base64.b64encode(f"{USER}:{password}".encode()).decode()
        request.add_header("Authorization", f"Basic {login}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code
    except OSError:
        return None
