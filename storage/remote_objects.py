"""Store objects in a bucket: files first, the manifest last, so that an object with a manifest is complete.

An interrupted upload is resumed file by file: a file that exists already is read back, and sent again only if its
sha256 differs from the manifest. An equal size proves nothing. Large files are uploaded in parts, several at once.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import NotFoundError
from obstore.store import ObjectStore as Remote

from vantage.storage.durable_files import make_folder, sync_file
from vantage.storage.refs import uri_of
from vantage.storage.sealed_folders import MANIFEST, find_problems, read_manifest

_TRANSFERS = 8
"""Files that are transferred at once."""

PART_BYTES = 8 * 2**20
"""Bytes of the parts in which larger files are uploaded."""
_MAX_PARTS = 9000
"""Most parts of a file; the storages accept 10,000."""

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class RemoteObjects:
    """The objects of one bucket."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def upload(self, folder: Path, digest: str) -> None:
        """Upload the missing files of a sealed folder, then its manifest; this can be repeated after a kill."""
        records = read_manifest(folder, digest=digest)
        sizes = {path: record["size"] for path, record in records.items()}
        there = self.sizes(digest)
        intact = {MANIFEST: (folder / MANIFEST).stat().st_size, **sizes}
        shas = {MANIFEST: digest, **{path: record["sha256"] for path, record in records.items()}}
        same_size = [path for path in intact if there.get(path) == intact[path]]
        proven = {
            path
            for path, sha in zip(
                same_size, _at_once(lambda path: self._sha256(digest, path), same_size), strict=True
            )
            if sha == shas[path]
        }
        _at_once(
            lambda path: self._send(folder, digest, path), [path for path in sizes if path not in proven]
        )
        if MANIFEST not in proven:
            self._send(folder, digest, MANIFEST)

    def fetch(self, digest: str, folder: Path) -> list[str]:
        """Download an object to a new folder, and read every byte; returns its problems."""
        make_folder(folder)
        try:
            self._download(digest, MANIFEST, folder)
            paths = list(read_manifest(folder, digest=digest))
            _at_once(lambda path: self._download(digest, path, folder), paths)
        except (NotFoundError, FileNotFoundError):
            there = self.sizes(digest)
            expected = read_manifest(folder, digest=digest) if MANIFEST in there else [MANIFEST]
            return [f"{path}: is missing" for path in expected if path not in there]
        except ValueError as error:
            return [str(error)]
        return find_problems(folder, digest=digest)

    def fetch_files(self, digest: str, paths: Iterable[str], folder: Path) -> None:
        """Download some files of an object to a folder.

        Raises:
            ValueError: a file is missing.
        """
        for path in paths:
            try:
                self._download(digest, path, folder)
            except (NotFoundError, FileNotFoundError):
                raise ValueError(f"{uri_of(digest)}/{path} is missing") from None

    def sizes(self, digest: str) -> dict[str, int]:
        """Return path → bytes of the existing files of an object, complete or not."""
        prefix = f"{uri_of(digest)}/"
        listed = obstore.list(self._remote, prefix)
        return {str(each["path"]).partition(prefix)[2]: each["size"] for batch in listed for each in batch}

    def quarantine_manifest(self, digest: str) -> None:
        """Mark a damaged object as incomplete, so that the next commit repairs it."""
        path = f"{uri_of(digest)}/{MANIFEST}"
        try:
            aside = copy_aside(self._remote, path)
            obstore.delete(self._remote, path)
        except (NotFoundError, FileNotFoundError):
            return  # another machine has removed the manifest, or there was none
        _log.warning("%s is damaged and not used (manifest kept as %s)", uri_of(digest), aside)

    def _send(self, folder: Path, digest: str, path: str) -> None:
        file = folder / path
        chunk_size = max(PART_BYTES, file.stat().st_size // _MAX_PARTS + 1)
        obstore.put(self._remote, f"{uri_of(digest)}/{path}", file, chunk_size=chunk_size)

    def _sha256(self, digest: str, path: str) -> str | None:
        """Return the sha256 of a file; None if it no longer exists."""
        hashed = hashlib.sha256()
        try:
            for part in obstore.get(self._remote, f"{uri_of(digest)}/{path}").stream():
                hashed.update(part)
        except (NotFoundError, FileNotFoundError):
            return None
        return hashed.hexdigest()

    def _download(self, digest: str, path: str, folder: Path) -> None:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for part in obstore.get(self._remote, f"{uri_of(digest)}/{path}").stream():
                file.write(part)
        target.chmod(0o444)
        sync_file(target)


def copy_aside(remote: Remote, path: str) -> str:
    """Copy a damaged file to ``quarantine/``; returns the path of the copy."""
    aside = f"{quarantine_of(path)}/{secrets.token_hex(4)}"
    obstore.copy(remote, path, aside)
    return aside


def quarantine_of(path: str) -> str:
    """Return the path of the folder for damaged versions of a path."""
    return f"quarantine/{path.replace('/', '-')}"


def _at_once(work: Callable[[str], _Result], paths: Iterable[str]) -> list[_Result]:
    with ThreadPoolExecutor(_TRANSFERS) as transfers:
        return list(transfers.map(work, paths))
