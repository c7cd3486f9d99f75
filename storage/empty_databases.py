"""New SQLite databases of Prefect and MLflow: all tables, and no later rows.

Their migrations take seconds for every new workspace. So a database is kept in its state after the first migration on
this machine (``vantage.storage.machine_cache``), under a name with the version of the package that made it.
"""

import sqlite3
import tempfile
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from vantage.storage.durable_files import replace_file
from vantage.storage.machine_cache import keep_derived, read_derived

_VERSION_TABLE = "alembic_version"


@contextmanager
def migrated_once(name: str, database: Path | None, *, rows_of: Collection[str] = ()) -> Iterator[None]:
    """Keep the database that the body opens: if it is new, it is filled from a kept one, or kept if there is none.

    Only one caller at a time: callers hold a lock. Whoever opens the database still checks its version, and migrates it
    if needed.

    Args:
        name: name of the kept database, with the version of the package that makes the tables.
        database: path of the database, which is new if the file is missing or empty; None: there is no database.
        rows_of: tables whose rows are kept too, since every new database has them.
    """
    empty = database.stat() if database is not None and database.is_file() else None
    if database is None or (empty is not None and empty.st_size):
        yield
    elif (kept := read_derived(name)) is not None:
        replace_file(database, kept, private=empty is not None and not empty.st_mode & 0o077)
        yield
    else:
        yield
        _keep(name, database, rows_of)


def _keep(name: str, database: Path, rows_of: Collection[str]) -> None:
    """Keep the tables, and the rows of ``rows_of``, even while the database is in use; do nothing if it was not
    migrated."""
    with suppress(OSError, sqlite3.Error), tempfile.TemporaryDirectory(prefix="vantage-database-") as folder:
        file = Path(folder) / "empty.db"
        with (
            closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(file)) as copy,
        ):
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = delete")  # so that the database is one file
            if not copy.execute(f"SELECT count(*) FROM {_VERSION_TABLE}").fetchone()[0]:
                return
            for (table,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                if table not in (_VERSION_TABLE, *rows_of):
                    copy.execute(f'DELETE FROM "{table}"')
            copy.commit()
            copy.execute("VACUUM")  # deleted rows are still in the pages
        keep_derived(name, file.read_bytes())
