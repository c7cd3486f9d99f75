"""File operations that survive a kill or a power loss.

After a kill, everything written to the kernel is kept. After a power loss, a file's content is kept only after fsync of
the file, and its name only after fsync of its folder. Rename is atomic: a reader sees the old file or the new one.
"""

import errno
import fcntl
import glob
import math
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

_NEW = ".new"
LONGEST_NAME = 255
"""Bytes of the longest name that file systems take."""
LEFT_OVER_SECONDS = 3600.0
"""Age in seconds from which a file without its final name counts as a killed writer's."""
_expected: dict[tuple[Path, tuple[int, int]], int] = {}
"""(Folder, its device and inode), for folders that must stay while this process works in them → expecting blocks."""
_counting = threading.Lock()
"""Held while ``_expected`` changes: parallel stages work in one store, each in its own thread."""
REMOVED = ".removed-"
"""Mark in the name of a folder that is being removed."""


class FolderGone(OSError):
    """A folder that a process works in was moved away or removed; nothing is made in its place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(
            f"{folder} was moved or removed while it was in use; move it back, and run the same command again"
        )


@contextmanager
def expected(folder: Path) -> Iterator[None]:
    """Expect the folder to stay: inside the block, ``FolderGone`` is raised instead of making anything in its place."""
    key = (folder, _identity(folder) or (0, 0))
    with _counting:
        _expected[key] = _expected.get(key, 0) + 1
    try:
        yield
    finally:
        with _counting:
            _expected[key] -= 1
            if not _expected[key]:
                del _expected[key]


def check_expected(path: Path) -> None:
    """Raise FolderGone if the path lies in an expected folder that no longer exists, or that was replaced."""
    for folder, identity in tuple(_expected):
        if path.is_relative_to(folder) and _identity(folder) != identity:
            raise FolderGone(folder)


def sync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    _sync(path, os.O_RDONLY | os.O_NOFOLLOW)


def sync_folder(path: Path) -> None:
    """Wait until the names in the folder are on the disk (not the files' content)."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, so that they survive a power loss; an existing folder is kept.

    Raises:
        FolderGone: the path lies in an expected folder that is gone.
    """
    check_expected(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing or [path]:
        sync_folder(folder.parent)


def write_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a new file and wait until its content is on the disk; its name needs ``sync_folder``.

    Args:
        private: whether only the file's owner can read it.
    """
    with open(path, "xb", opener=open_private if private else None) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a file: after a kill or a power loss, either the old or the new file is there, complete.

    If several processes write at once, the file of the last one stays. A folder with this name is kept as
    ``NAME.damaged.1``.
    """
    with _new_file(path) as new:
        write_file(new, data, private=private)
        remove_left_overs(path, before=new.stat().st_mtime - LEFT_OVER_SECONDS)
        _replace(new, path)
    sync_folder(path.parent)


def replace_file_unsynced(path: Path, data: bytes) -> None:
    """Replace a file like ``replace_file``, but without waiting for the disk: a power loss may lose the new file."""
    with _new_file(path) as new:
        new.write_bytes(data)
        _replace(new, path)


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder whose content is on the disk, and wait until its new name is on the disk.

    Raises:
        OSError: ``target`` exists and is not empty (ENOTEMPTY, EEXIST), among the usual causes.
    """
    os.rename(source, target)
    sync_folder(target.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists; it is renamed first, so that no half-removed folder is used."""
    # Another process may have removed it already.
    with suppress(FileNotFoundError):
        os.rename(folder, folder.with_name(f"{folder.name}{REMOVED}{secrets.token_hex(8)}"))
    for removed in folder.parent.glob(f"{folder.name}{REMOVED}*"):
        shutil.rmtree(removed, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, among threads and processes; waits for it. The lock ends with its process.

    The file stays: if it were removed, two holders could have locks, one on the old file and one on a new one.
    """
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """Return the descriptor of a lock's file, which is created if missing.

    Raises:
        ValueError: a folder has the file's name.
        OSError: a link has the file's name (ELOOP); the target of the link is not touched.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder where a lock's file belongs; move it away") from None


def try_lock(descriptor: int) -> bool:
    """Try to take a file's lock without waiting; returns whether it is taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        raise
    return True


def open_private(path: str | Path, flags: int) -> int:
    """Open a file for ``open(…, opener=)``: new or existing, it is accessible by its owner only, whatever the umask."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_mode & 0o077:
        with suppress(PermissionError):  # the file of another user who allows us to write it
            os.fchmod(descriptor, 0o600)
    return descriptor


def make_private(path: Path) -> None:
    """Create an empty file that only its owner can access, for a library that would create the file by the umask."""
    os.close(open_private(path, os.O_RDWR | os.O_CREAT))


def hidden_beside(path: Path, ending: str) -> Path:
    """Return a hidden name beside the path, from its name and the ending; a long name is cut, so that file systems
    accept it."""
    kept = os.fsencode(path.name)[: LONGEST_NAME - len(os.fsencode(ending)) - 1]
    return path.with_name(f".{os.fsdecode(kept)}{ending}")


def free_path(folder: Path, name: str) -> Path:
    """Return the first free path of ``name.1``, ``name.2`` …; the caller holds a lock if two processes may ask."""
    numbered = (folder / f"{name}.{number}" for number in count(1))
    return next(path for path in numbered if not os.path.lexists(path))


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yield a name beside the file that no other writer uses, for the file's new content; the new file is removed if
    the block fails."""
    new = hidden_beside(path, f".{secrets.token_hex(8)}{_NEW}")
    try:
        yield new
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        check_expected(path)
        raise


def remove_left_overs(path: Path, *, before: float = math.inf) -> None:
    """Remove the remains of the file's killed writers.

    ``before``: only files older than this time of the file system's clock are removed, since younger ones may belong to
    a living writer. The default is for a caller that is the file's only writer.
    """
    begin = hidden_beside(path, f".{'0' * 16}{_NEW}").name[: -len(f"{'0' * 16}{_NEW}")]
    for left in path.parent.glob(f"{glob.escape(begin)}*{_NEW}"):
        with suppress(OSError):  # another writer removes it, too
            if left.stat().st_mtime < before:
                left.unlink()


def _replace(new: Path, path: Path) -> None:
    try:
        os.replace(new, path)
    except IsADirectoryError:
        _move_folder_aside(path)
        os.replace(new, path)


def _move_folder_aside(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        os.rename(path, free_path(path.parent, f"{path.name}.damaged"))


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return an identity of a folder that is independent of its name; None if the folder does not exist."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
