"""Put a backup back: the databases, MLflow's files, the workspace."""

import secrets
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from pydantic import ValidationError

from deploy.backup.copying import move_to_new
from deploy.backup.postgres_dumps import AS_ANOTHER, restore_databases
from deploy.backup.stores import ARTIFACTS, DATABASES, INDEX, SETTINGS, WORKSPACE, Index, Stores
from deploy.servers.failure import ServersFailure
from deploy.servers.lifecycle import alone, say
from deploy.servers.postgres import OwnPostgres, data_folder
from deploy.servers.settings import Settings, write_private


def restore(source: Path, stores: Stores) -> None:
    """Restore a backup into an empty place.

    Raises:
        ServersFailure: the folder is no backup or lacks a requested part, or the place is not empty.
    """
    index = _read_index(source)
    for wanted, has, name in (
        (stores.servers, index.has_servers, "--servers"),
        (stores.workspace, index.has_workspace, "--workspace"),
    ):
        if wanted is not None and not has:
            raise ServersFailure(f"{source} was saved without {name}; leave it out")
        if wanted is not None and wanted.is_dir() and any(wanted.iterdir()):
            raise ServersFailure(f"{name}={wanted} is not empty; move it away, or name another folder")
    if stores.servers is not None:
        _restore_servers(source, stores.servers)
    if stores.workspace is not None:
        _restore_workspace(source / WORKSPACE, stores.workspace)
    say(f"restored from {source}, which was saved from {index.began} to {index.ended}")
    if stores.servers is not None:
        say(f"next: make servers SERVERS={stores.servers}")
    if stores.workspace is not None:
        say(
            f"next: vantage status --workspace {stores.workspace}, and vantage resume RUN for what had not ended; the first run also "
            "sends MLflow what it lacks"
        )


def _read_index(source: Path) -> Index:
    try:
        return Index.model_validate_json((source / INDEX).read_bytes())
    except OSError:
        raise ServersFailure(
            f"{source} is no backup: {INDEX} is missing, which is written when all is saved"
        ) from None
    except ValidationError as error:
        raise ServersFailure(f"{source / INDEX} cannot be read: {error.errors()[0]['msg']}") from None


def _restore_servers(source: Path, servers: Path) -> None:
    with alone(servers):
        settings = Settings.model_validate_json((source / SETTINGS).read_bytes())
        settings.postgres_folder = data_folder(servers)
        postgres = OwnPostgres(settings) if settings.postgres_url is None else None
        try:
            if postgres is not None:
                postgres.ensure_running()
            restore_databases(settings, source / DATABASES)
            if (source / ARTIFACTS).is_dir():
                shutil.copytree(source / ARTIFACTS, servers / "artifacts", symlinks=True)
            write_private(servers / "settings.json", settings.model_dump_json(indent=1))
        except BaseException:
            if postgres is not None:
                postgres.stop()
                shutil.rmtree(settings.postgres_folder, ignore_errors=True)
            shutil.rmtree(servers, ignore_errors=True)
            raise


def _restore_workspace(source: Path, workspace: Path) -> None:
    """Copy the workspace beside its place, then move the copy there, so that it appears complete or not at all."""
    partial = workspace.with_name(f"{workspace.name}.{secrets.token_hex(4)}.restoring")
    try:
        shutil.copytree(source, partial, symlinks=True)
        database = partial / "mlflow.db"
        if database.is_file():
            with closing(sqlite3.connect(database)) as connection, connection:
                connection.execute(AS_ANOTHER)
        move_to_new(partial, workspace)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
