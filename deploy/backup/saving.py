"""Save the three stores, in an order in which each may be newer than the one before."""

import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from deploy.backup.copying import copy_folder, copy_sealed_folders, copy_sqlite, move_to_new
from deploy.backup.postgres_dumps import dump_databases
from deploy.backup.stores import ARTIFACTS, DATABASES, INDEX, SETTINGS, WORKSPACE, Index, Stores
from deploy.servers.failure import ServersFailure
from deploy.servers.lifecycle import read_settings, say
from deploy.servers.settings import write_private

SQLITE = ("prefect/prefect.db", "mlflow.db")
"""Databases of a workspace without servers, in the order in which they are saved."""
_HALF_MADE = frozenset({"staging", "saving"})
"""Folders of the store with artifacts and checkpoints that are being written."""
_LATER = ("runs", "store")
_STORE_LAST = ("scratch", "locks", "objects")
"""Folders of the store that are saved after its references, in this order."""


def save(stores: Stores, to: Path) -> None:
    """Save the stores in a new folder, while runs may write to them.

    MLflow and Prefect come first, so that a restored workspace is never behind MLflow: it sends records that MLflow
    lacks, but could not take back surplus ones. Within the workspace, records come before the files that they name.

    Raises:
        ServersFailure: something cannot be saved; then there is no folder.
    """
    if to.exists():
        raise ServersFailure(f"{to} exists; name a new folder, or use --dated")
    if stores.workspace is not None and not (stores.workspace / "runs").is_dir():
        raise ServersFailure(f"{stores.workspace} is no workspace: it has no folder runs")
    began = _now()
    earlier = _earlier(to)
    partial = to.with_name(f"{to.name}.{secrets.token_hex(4)}.partial")  # another call may save there too
    partial.mkdir(mode=0o700, parents=True)
    try:
        if stores.servers is not None:
            _save_servers(stores.servers, partial)
        if stores.workspace is not None:
            _save_workspace(stores.workspace, partial / WORKSPACE, earlier)
        index = Index(
            began=began,
            ended=_now(),
            has_servers=stores.servers is not None,
            has_workspace=stores.workspace is not None,
        )
        write_private(partial / INDEX, index.model_dump_json(indent=1))
        move_to_new(partial, to)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    say(f"saved in {to}")


def _save_servers(servers: Path, partial: Path) -> None:
    if not (servers / "settings.json").is_file():
        raise ServersFailure(f"{servers} has no servers: settings.json is missing (`make servers` makes it)")
    settings = read_settings(servers)
    dump_databases(settings, partial / DATABASES)
    write_private(partial / SETTINGS, settings.model_dump_json(indent=1))
    # The files come after MLflow's database, so that every file that it names exists.
    if (servers / "artifacts").is_dir():
        copy_folder(servers / "artifacts", partial / ARTIFACTS)


def _save_workspace(workspace: Path, target: Path, earlier: Path | None) -> None:
    target.mkdir(mode=0o700)
    for name in SQLITE:
        if (workspace / name).is_file():
            copy_sqlite(workspace / name, target / name)
    for each in sorted(workspace.iterdir()):  # MLflow's files, and files that are not ours
        if each.name not in (*_LATER, "prefect", "mlflow.db") and not _is_beside_database(each):
            _copy(each, target / each.name)
    copy_folder(workspace / "runs", target / "runs")
    store = workspace / "store"
    if not store.is_dir():
        return
    (target / "store").mkdir(mode=0o700)
    for each in _ordered(store):
        copy = target / "store" / each.name
        if each.name == "objects":
            had = None if earlier is None else earlier / WORKSPACE / "store" / "objects"
            copy_sealed_folders(each, copy, had)
        else:
            _copy(each, copy, left_out=_HALF_MADE)


def _ordered(store: Path) -> Iterator[Path]:
    """Yield references first; then checkpoints, whose artifact may exist by then; the artifacts last."""
    entries = {each.name: each for each in sorted(store.iterdir()) if each.name not in _HALF_MADE}
    last = [entries.pop(name) for name in _STORE_LAST if name in entries]
    refs = [entries.pop("refs")] if "refs" in entries else []
    yield from (*refs, *entries.values(), *last)


def _copy(source: Path, target: Path, *, left_out: frozenset[str] = frozenset()) -> None:
    if source.is_dir():
        copy_folder(source, target, left_out=left_out)
    elif source.is_file():
        shutil.copy2(source, target)


def _is_beside_database(path: Path) -> bool:
    """Return whether a file belongs to SQLite or locks its database."""
    return path.name.startswith("mlflow.db-") or path.suffix == ".lock"


def _earlier(to: Path) -> Path | None:
    """Return the newest backup in the same folder, by the time in its name."""
    found = sorted(each.parent for each in to.parent.glob(f"*/{INDEX}")) if to.parent.is_dir() else []
    return found[-1] if found else None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
