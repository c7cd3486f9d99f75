"""Dump and restore PostgreSQL's databases with PostgreSQL's programs."""

import os
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg

from deploy.servers.failure import ServersFailure
from deploy.servers.postgres import DATABASES, OwnPostgres, create_databases, programs
from deploy.servers.settings import Settings


def dump_databases(settings: Settings, folder: Path) -> None:
    """Write a dump of each database, each as of one moment, while servers write to it.

    Raises:
        ServersFailure: PostgreSQL does not answer, or the program for dumps is older than the server.
    """
    folder.mkdir(mode=0o700)
    for database in DATABASES:  # Prefect's database first: MLflow's may be newer
        _run(settings, "pg_dump", "--format=custom", f"--file={folder / database}.dump", database)


def restore_databases(settings: Settings, folder: Path) -> None:
    """Fill new databases from their dumps; runs then send MLflow the missing records (``AS_ANOTHER``).

    Raises:
        ServersFailure: a database has contents already, or its dump cannot be read.
    """
    create_databases(settings.server_url)
    for database in DATABASES:
        _require_empty(settings, database)
    for database in DATABASES:
        options = ("--no-owner", "--exit-on-error", "--single-transaction", f"--dbname={database}")
        _run(settings, "pg_restore", *options, str(folder / f"{database}.dump"))
    with psycopg.connect(f"{settings.server_url}/vantage_mlflow") as connection:
        connection.execute(AS_ANOTHER)


AS_ANOTHER = "UPDATE experiments SET creation_time = creation_time + 1"
"""Statement that makes a restored MLflow a new one for every run. A run notes how much it has sent to which MLflow, by
the creation time of the experiment. A restored MLflow lacks the records after its dump; so it gets all records again,
and keeps those it has."""


def _require_empty(settings: Settings, database: str) -> None:
    with psycopg.connect(f"{settings.server_url}/{database}") as connection:
        found = connection.execute(
            "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'"
        ).fetchone()
    if found != (0,):
        raise ServersFailure(
            f"the database {database} has tables already, and a backup is restored into an empty one only; drop it "
            f"(DROP DATABASE {database}) if its contents may go"
        )


def _run(settings: Settings, program: str, *arguments: str) -> None:
    """Run one of PostgreSQL's client programs; its login is in no command line."""
    address = urlsplit(settings.server_url)
    done = subprocess.run(
        [_folder_of_programs(settings) / program, "--no-password", *arguments],
        capture_output=True,
        text=True,
        env={
            "PATH": os.defpath,
            "PGHOST": address.hostname or "",
            "PGPORT": str(address.port or 5432),
            "PGUSER": unquote(address.username or ""),
            "PGPASSWORD": unquote(address.password or ""),
        },
    )
    if done.returncode != 0:
        raise ServersFailure(f"{program} failed: {done.stderr.strip()}")


def _folder_of_programs(settings: Settings) -> Path:
    if settings.postgres_url is None:
        return OwnPostgres(settings).programs()
    found = next(programs(), None)
    if found is None:
        raise ServersFailure("pg_dump is missing; install it (apt-get install postgresql-client)")
    return found
