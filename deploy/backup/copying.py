"""Copies of files while other processes write them.

Vantage replaces files and folders by renames, and appends whole lines. So a copied file is entirely old or entirely new. Its
last line may be cut, which every reader expects. A file that vanishes during the copy was replaced or removed; then the
folder is copied again.
"""

import errno
import os
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from deploy.servers.failure import ServersFailure

TRIES = 20
"""Number of attempts to copy a folder whose files are replaced meanwhile; checkpoints are at least a few seconds
apart."""


def copy_folder(source: Path, target: Path, *, left_out: frozenset[str] = frozenset()) -> None:
    """Copy a folder, with the modes and times of its files, but without entries named ``left_out``.

    Raises:
        ServersFailure: files vanish faster than they are copied.
    """

    def ignored(_: str, names: list[str]) -> set[str]:
        return {*names} & left_out

    for _ in range(TRIES):
        try:
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
            return
        except (shutil.Error, FileNotFoundError) as error:
            shutil.rmtree(target, ignore_errors=True)
            if not _is_of_vanished_files(error):
                raise
    raise ServersFailure(f"{source} changes faster than it is copied; save again when fewer stages run")


def _is_of_vanished_files(error: OSError) -> bool:
    """Return whether the copy failed only because files had vanished."""
    if isinstance(error, shutil.Error):
        return all("[Errno 2]" in str(reason) for *_, reason in error.args[0])
    return True


def copy_sealed_folders(source: Path, target: Path, earlier: Path | None) -> None:
    """Copy folders that never change once they exist. Folders of an earlier backup are hard-linked, and take no space.

    ``earlier``: the same folder in the earlier backup.
    """
    target.mkdir(mode=0o700, parents=True)
    for folder in sorted(source.iterdir()):
        had = None if earlier is None else earlier / folder.name
        if had is not None and _sizes(had) == _sizes(folder):
            shutil.copytree(had, target / folder.name, copy_function=os.link)
        else:
            with suppress(FileNotFoundError):  # `vantage gc` has removed the folder
                copy_folder(folder, target / folder.name)


def _sizes(folder: Path) -> dict[str, int] | None:
    if not folder.is_dir():
        return None
    files = (each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.stat().st_size for each in files}


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy a database of SQLite as of one moment, while others write to it.

    Raises:
        ServersFailure: the database cannot be read.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(source))}?mode=ro", uri=True, timeout=60)) as database,
            closing(sqlite3.connect(target)) as copy,
        ):
            database.backup(copy)
    except sqlite3.Error as error:
        raise ServersFailure(f"{source} cannot be saved: {error}") from error
    target.chmod(0o600)


def move_to_new(folder: Path, to: Path) -> None:
    """Move a complete folder to its place, which must be free or an empty folder.

    Raises:
        ServersFailure: another call has put something there meanwhile.
    """
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise ServersFailure(f"{to} was made by another call meanwhile; name a new folder") from None
