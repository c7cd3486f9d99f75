"""Store the environments of computations, one file for each digest: many artifacts are made in one environment.

environments/<sha256>.json    ``vantage.schemas.records.environment.Environment``; a ref's provenance names the digest
"""

import hashlib
from contextlib import suppress
from pathlib import Path

from vantage.schemas.records.environment import Environment
from vantage.storage.digests import checked_digest
from vantage.storage.durable_files import make_folder, replace_file
from vantage.storage.storage import Readable, Storage
from vantage.storage.store import Store

_FOLDER = "environments"


class DamagedEnvironment(OSError):
    """The stored bytes of an environment differ from its digest."""


def keep_environment(storage: Storage, environment: Environment) -> str:
    """Store the environment unless it is stored already; returns its digest. Two writers of one digest write the same
    bytes."""
    digest, path = environment.digest, _path(environment.digest)
    if isinstance(storage, Store):
        file = storage.root / path
        if not _holds(file, environment.content):
            make_folder(file.parent)
            # Under the lock, since a half-written file of another process has the same name.
            with storage.object_lock(digest):
                replace_file(file, environment.content)
        return digest
    import obstore
    from obstore.exceptions import AlreadyExistsError

    with suppress(AlreadyExistsError):
        obstore.put(storage.remote, path, environment.content, mode="create")
    return digest


def read_environment(storage: Readable, digest: str) -> Environment | None:
    """Return the environment of a digest; None: the storage does not have it.

    Raises:
        DamagedEnvironment: the stored bytes do not match the digest.
        ValueError: ``digest`` is not a digest.
    """
    path = _path(checked_digest(digest))
    try:
        data = _read(storage, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if hashlib.sha256(data).hexdigest() != digest:
        raise DamagedEnvironment(
            f"{path} is damaged: its sha256 is {hashlib.sha256(data).hexdigest()[:12]}; restore it from a copy of the storage"
        )
    return Environment.model_validate_json(data)


def _read(storage: Readable, path: str) -> bytes:
    if isinstance(storage, Store):
        return (storage.root / path).read_bytes()
    import obstore
    from obstore.exceptions import NotFoundError

    try:
        return bytes(obstore.get(storage.remote, path).bytes())
    except (FileNotFoundError, NotFoundError):
        raise FileNotFoundError(path) from None


def _holds(file: Path, content: bytes) -> bool:
    """Return whether the file has this content; a damaged file is written again."""
    try:
        return file.read_bytes() == content
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _path(digest: str) -> str:
    return f"{_FOLDER}/{digest}.json"
