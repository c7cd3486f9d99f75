"""The few file operations whose order decides what survives a kill or a power loss.

A kill loses nothing that the kernel was given. A power loss keeps a file's content only after fsync of the file,
and its name only after fsync of the folder that holds the name. Rename is atomic: a reader sees the old or the new.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path


def sync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    _sync(path, os.O_RDONLY | os.O_NOFOLLOW)


def sync_folder(path: Path) -> None:
    """Wait until the names in the folder are on the disk (not what they name)."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, so that their names survive a power loss; an existing one is kept."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing or [path]:
        sync_folder(folder.parent)


def write_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a new file and wait until its content is on the disk; its name needs ``sync_folder``.

    Args:
        private: readable by its owner alone.
    """
    with open(path, "xb", opener=open_private if private else None) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Put a file in the place of another: after a kill or a power loss there is the old or the new, whole.

    One writer at a time: hold a lock where there may be two. A folder in its place is kept as ``NAME.damaged.1``.
    """
    new = _new_name(path)
    _move_folder_aside(new)
    new.unlink(missing_ok=True)
    write_file(new, data, private=private)
    _replace(new, path)
    sync_folder(path.parent)


def show_file(path: Path, data: bytes) -> None:
    """Like ``replace_file`` for readers at work, but without waiting for the disk: a power loss may lose it."""
    new = _new_name(path)
    _move_folder_aside(new)
    new.write_bytes(data)
    _replace(new, path)


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder whose content is on the disk, and wait until its new name is.

    Raises:
        OSError: ``target`` exists and is not empty (ENOTEMPTY, EEXIST), among the usual causes.
    """
    os.rename(source, target)
    sync_folder(target.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, waiting for whoever has it; threads and processes alike. It ends with its holder.

    The file stays: removing it would let two holders in, one on the old file and one on the new.
    """
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """The descriptor of a lock's file, which is made if there is none.

    Raises:
        ValueError: a folder has its name.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder where a lock's file belongs; move it away") from None


def try_lock(descriptor: int) -> bool:
    """Take a file's lock without waiting; whether nobody else has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        raise
    return True


def open_private(path: str | Path, flags: int) -> int:
    """For ``open(…, opener=)``: a file that is made is its owner's alone, whatever the umask; so is one that was there."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_mode & 0o077:
        with suppress(PermissionError):  # somebody else's file, who let us write it
            os.fchmod(descriptor, 0o600)
    return descriptor


def make_private(path: Path) -> None:
    """Make an empty file that is its owner's alone, for a library that would make it after the umask."""
    os.close(open_private(path, os.O_RDWR | os.O_CREAT))


def free_path(folder: Path, name: str) -> Path:
    """The first of ``name.1``, ``name.2`` … that is not taken; where two may ask, one holds a lock."""
    numbered = (folder / f"{name}.{number}" for number in count(1))
    return next(path for path in numbered if not os.path.lexists(path))


def _replace(new: Path, path: Path) -> None:
    try:
        os.replace(new, path)
    except IsADirectoryError:
        _move_folder_aside(path)
        os.replace(new, path)


def _move_folder_aside(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        os.rename(path, free_path(path.parent, f"{path.name}.damaged"))


def _new_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
