"""Sealed folders: a folder with a manifest that lists exactly its files, with size and sha256.

The manifest's sha256 is the folder's digest. It depends only on the files' paths and bytes, so equal content has an
equal digest.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from vantage.schemas.canonical_json import canonical_json
from vantage.storage.durable_files import sync_file, sync_folder, write_file

MANIFEST = "manifest.json"

MAX_MANIFEST_BYTES = 64 * 2**20
"""Most bytes of a manifest; larger ones are refused without reading them."""

_MAX_THREADS = 8

# Letters, digits and a few marks: no path separator of any system, no percent sign, no control character.
_NAME = re.compile(r"[A-Za-z0-9_.,+=@() -]{1,255}")


class NothingToSeal(ValueError):
    """A folder has no file."""


class UnsafePath(ValueError):
    """A file that is not allowed in a sealed folder: a link, a special file, or a name that could leave the folder."""


def seal(folder: Path) -> str:
    """Hash every file, write the manifest, sync everything to the disk, and return the folder's digest.

    Empty folders inside are removed. The files become read-only.

    Raises:
        UnsafePath: a link, a special file, a hard link, or a name that is not allowed.
        NothingToSeal: there is no file.
        ValueError: a file has the manifest's name.
        OSError: the disk is full or broken; the folder can be sealed again later.
    """
    paths, empty_folders, problems = _scan(folder)
    if problems:
        raise UnsafePath("; ".join(problems))
    if MANIFEST in paths:
        raise ValueError(f"{folder / MANIFEST}: this name is kept for the folder's own manifest; use another")
    if not paths:
        raise NothingToSeal(f"{folder} holds no file; nothing can be sealed")
    for empty in empty_folders:
        (folder / empty).rmdir()
    for path in sorted(paths):
        (folder / path).chmod(0o444)
        sync_file(folder / path)
    manifest = canonical_json({"files": _records(folder, paths)}).encode()
    try:
        write_file(folder / MANIFEST, manifest)
        (folder / MANIFEST).chmod(0o444)
        for inner in sorted({folder / parent for path in paths for parent in PurePosixPath(path).parents}):
            sync_folder(inner)
    except OSError:
        (folder / MANIFEST).unlink(missing_ok=True)
        raise
    return hashlib.sha256(manifest).hexdigest()


def read_sealed_file(folder: Path, path: str, *, digest: str) -> bytes | None:
    """Return one file of a sealed folder; None if the folder was sealed without it.

    Raises:
        ValueError: manifest or file is invalid, or does not match the digest.
        OSError: one of them cannot be read.
    """
    record = read_manifest(folder, digest=digest).get(path)
    if record is None:
        return None
    data = (folder / path).read_bytes()
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise ValueError(f"{path}: sha256 is {hashlib.sha256(data).hexdigest()}, must be {record['sha256']}")
    return data


def find_problems(folder: Path, *, digest: str | None = None, read: bool = True) -> list[str]:
    """Return problems of a sealed folder, one line each; empty: intact.

    Args:
        folder: the sealed folder.
        digest: the expected digest of the folder; None: not checked.
        read: True: read and hash every file. False: compare only the manifest, the set of files and their sizes,
            which is fast but does not find changed bytes.
    """
    if folder.is_symlink() or not folder.is_dir():
        return ["the folder is missing, or is a link"]
    problems: list[str] = []
    try:
        paths, empty_folders, problems = _scan(folder)
        listed = read_manifest(folder, digest=digest)
    except (ValueError, OSError) as error:
        return [*problems, str(error)]
    problems += [f"{empty}: is an unexpected empty folder" for empty in empty_folders]
    found = paths - {MANIFEST}
    problems += [f"{path}: is missing" for path in sorted(listed.keys() - found)]
    problems += [f"{path}: is not in the manifest" for path in sorted(found - listed.keys())]
    common = sorted(listed.keys() & found)
    try:
        actual = _records(folder, common) if read else [_size(folder, path) for path in common]
    except OSError as error:
        return [*problems, f"cannot be read: {error}"]
    for record in actual:
        expected = listed[record["path"]]
        if record["size"] != expected["size"]:
            problems.append(f"{record['path']}: has {record['size']} bytes, must have {expected['size']}")
        elif record.get("sha256", expected["sha256"]) != expected["sha256"]:
            problems.append(f"{record['path']}: sha256 is {record['sha256']}, must be {expected['sha256']}")
    return problems


def folder_stamp(folder: Path) -> tuple[tuple[Path, *tuple[int, ...]], ...]:
    """Return the file-system status of the folder and all its files; it changes when their bytes change.

    Raises:
        OSError: a file cannot be looked up.
    """
    found = [folder]
    for root, inner_folders, files in os.walk(folder, followlinks=False, onerror=_raise):
        found += [Path(root, name) for name in (*inner_folders, *files)]
    seen = [(path, path.lstat()) for path in sorted(found)]
    return tuple(
        (path, s.st_mode, s.st_nlink, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in seen
    )


def read_manifest(folder: Path, *, digest: str | None = None) -> dict[str, dict[str, Any]]:
    """Return path → ``{path, size, sha256}`` of a sealed folder.

    Raises:
        ValueError: the manifest is invalid, does not match ``digest``, or has a path that could leave the folder.
        FileNotFoundError: there is no manifest.
    """
    path = folder / MANIFEST
    if path.is_symlink() or path.lstat().st_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST}: is a link or longer than {MAX_MANIFEST_BYTES} bytes")
    data = path.read_bytes()
    actual = hashlib.sha256(data).hexdigest()
    if digest is not None and actual != digest:
        raise ValueError(f"{MANIFEST}: sha256 is {actual}, must be {digest}")
    try:
        manifest = json.loads(data)
        records = {record["path"]: record for record in manifest["files"]}
        well_formed = len(records) == len(manifest["files"]) and all(
            type(record["size"]) is int and type(record["sha256"]) is str for record in records.values()
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{MANIFEST}: cannot be read as a manifest ({type(error).__name__})") from error
    if not well_formed:
        raise ValueError(f"{MANIFEST}: lists a file twice, or one without size and sha256")
    for name in records:
        check_path(name)
    return records


def file_sha256(path: Path) -> str:
    """Return the sha256 of one file; links are refused."""
    return str(_record(path.parent, path.name)["sha256"])


def check_path(path: Any) -> None:
    """Refuse a relative path that could leave its folder on some system.

    Raises:
        UnsafePath: the path is absolute, has an empty part, ``.`` or ``..``, or a character that is not allowed (such
            as a
            backslash, percent sign or control character).
    """
    parts = path.split("/") if isinstance(path, str) else [""]
    if any(part in (".", "..") or not _NAME.fullmatch(part) for part in parts):
        raise UnsafePath(
            f"{path!r} is not a safe relative path; use letters, digits and _.,+=@()- and space, joined by /"
        )


def _scan(folder: Path) -> tuple[set[str], list[str], list[str]]:
    """Return all regular files below ``folder`` (links are not followed), empty folders (deepest first), and problems."""
    paths: set[str] = set()
    folders: set[str] = set()
    problems = []
    for root, inner_folders, files in os.walk(folder, followlinks=False, onerror=_raise):
        for name in (*inner_folders, *files):
            path = Path(root, name).relative_to(folder).as_posix()
            status = Path(root, name).lstat()
            try:
                check_path(path)
            except UnsafePath as error:
                problems.append(str(error))
                continue
            if stat.S_ISDIR(status.st_mode):
                folders.add(path)
            elif stat.S_ISLNK(status.st_mode):
                problems.append(f"{path}: is a symbolic link; copy what it points to")
            elif not stat.S_ISREG(status.st_mode):
                problems.append(f"{path}: is not a plain file")
            elif status.st_nlink > 1:
                problems.append(f"{path}: is shared with another name (hard link); copy it")
            else:
                paths.add(path)
    empty = folders - {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    return paths, sorted(empty, key=lambda path: -path.count("/")), problems


def _raise(error: OSError) -> None:
    raise error


def _records(folder: Path, paths: Iterable[str]) -> list[dict[str, Any]]:
    ordered = sorted(paths)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda path: _record(folder, path), ordered))


def _size(folder: Path, path: str) -> dict[str, Any]:
    return {"path": path, "size": (folder / path).lstat().st_size}


def _record(folder: Path, path: str) -> dict[str, Any]:
    descriptor = os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"path": path, "size": file.tell(), "sha256": sha256}
