"""Store signatures of artifacts and of decisions about them, beside the objects and refs; they are part of no digest.

    signatures/<stage key>/<key id>/key.pub                                    the public key
    signatures/<stage key>/<key id>/<sha256 of statement>/statement.json         the signed statement
    signatures/<stage key>/<key id>/<sha256 of statement>/signature.sigstore.json

Decisions of people about an artifact are in ``decisions/``, in the same way. A statement without a signature was not completely
written, and is ignored. Signatures are not removed with their artifact: a signed statement describes what was removed.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from vantage.storage.digests import checked_digest
from vantage.storage.durable_files import locked, make_folder, replace_file
from vantage.storage.storage import Readable, Storage
from vantage.storage.store import Store

KEY_FILE = "key.pub"
STATEMENT = "statement.json"
SIGNATURE = "signature.sigstore.json"
MAX_BYTES = 64 * 2**20
"""Most bytes of one file; larger files are not read."""

About = Literal["signatures", "decisions"]
"""Folder of statements: those in ``signatures`` are about artifacts, those in ``decisions`` about people's decisions on
them."""
_DIGEST = "[0-9a-f]{64}"
_NAME = re.compile(rf"({_DIGEST})/(?:key\.pub|({_DIGEST})/(statement\.json|signature\.sigstore\.json))")


@dataclass(frozen=True)
class SignedStatement:
    """A stored statement and its signature, unchecked."""

    key_id: str
    """Id of the key that is claimed to have signed; see ``vantage.signing.keys``."""
    name: str
    """Name under which it is stored: the sha256 that the statement had."""
    statement: bytes
    signature: bytes
    public_key: bytes | None
    """The stored public key, as PEM."""


def read_signatures(storage: Readable, stage_key: str, about: About = "signatures") -> list[SignedStatement]:
    """Return all signed statements of a stage key, in the order of their names."""
    import obstore  # takes a moment to load, and most runs do not need it

    prefix = f"{about}/{checked_digest(stage_key)}/"
    remote = storage.remote
    listed = [
        (str(each["path"]).partition(prefix)[2], each["size"])
        for batch in obstore.list(remote, prefix)
        for each in batch
    ]
    names = {name for name, size in listed if _NAME.fullmatch(name) and size <= MAX_BYTES}
    folders = sorted(name.removesuffix(f"/{STATEMENT}") for name in names if name.endswith(f"/{STATEMENT}"))

    def read(name: str) -> bytes | None:
        return bytes(obstore.get(remote, f"{prefix}{name}").bytes()) if name in names else None

    found = []
    for folder in folders:
        key_id, _, name = folder.partition("/")
        statement, signature = read(f"{folder}/{STATEMENT}"), read(f"{folder}/{SIGNATURE}")
        if statement is not None and signature is not None:
            found.append(SignedStatement(key_id, name, statement, signature, read(f"{key_id}/{KEY_FILE}")))
    return found


def add_signature(
    storage: Storage,
    stage_key: str,
    *,
    key_id: str,
    public_key: bytes,
    statement: bytes,
    signature: bytes,
    about: About = "signatures",
) -> None:
    """Store a signed statement, or replace a damaged one. The signature is written last, so that a signature implies a
    complete statement.

    Two processes that sign the same statement with the same key at once both write a valid signature; the last one stays.

    Raises:
        OSError: the disk or the bucket cannot be written.
    """
    folder = f"{checked_digest(key_id)}/{hashlib.sha256(statement).hexdigest()}"
    for name, data in (
        (f"{key_id}/{KEY_FILE}", public_key),
        (f"{folder}/{STATEMENT}", statement),
        (f"{folder}/{SIGNATURE}", signature),
    ):
        _write(storage, stage_key, f"{about}/{checked_digest(stage_key)}/{name}", data)


def place_of(storage: Storage, stage_key: str, key_id: str) -> str:
    """Return the path or address of a key's statements."""
    return f"{storage.address}/signatures/{stage_key}/{key_id}"


def _write(storage: Storage, stage_key: str, path: str, data: bytes) -> None:
    if isinstance(storage, Store):
        file = storage.root / path
        make_folder(file.parent)
        with locked(storage.swap_lock(stage_key)):
            replace_file(file, data)
    else:
        import obstore

        obstore.put(storage.remote, path, data)


def read_stored_manifest(storage: Readable, digest: str) -> bytes | None:
    """Return the bytes of an object's manifest, unchecked; None: there is no such object."""
    import obstore
    from obstore.exceptions import NotFoundError

    try:
        found = obstore.get(storage.remote, f"objects/{checked_digest(digest)}/manifest.json")
        return bytes(found.bytes()) if found.meta["size"] <= MAX_BYTES else b""
    except (NotFoundError, FileNotFoundError):
        return None
