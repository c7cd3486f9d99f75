"""Keep files of a user on one machine, outside any workspace: objects of buckets, and derived files.

A derived file can be made again in seconds, and nothing depends on it. A missing, damaged or unwritable file counts as
absent.
"""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_DERIVED = "derived"


def cache_root() -> Path:
    """Return ``$VANTAGE_CACHE``, or ``~/.cache/vantage``.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(os.environ.get("VANTAGE_CACHE") or Path.home() / ".cache" / "vantage")


def read_derived(name: str) -> bytes | None:
    """Return the bytes that were kept under the name; None: there are none, or they are damaged."""
    try:
        seal, data = (cache_root() / _DERIVED / name).read_bytes().split(b"\n", 1)
    except (OSError, ValueError, RuntimeError):
        return None
    return data if seal == _seal(data) else None


def keep_derived(name: str, data: bytes) -> None:
    """Keep the bytes for later processes of this user, who alone can read them. Several processes may do this at
    once."""
    with suppress(OSError, RuntimeError):
        folder = cache_root() / _DERIVED
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, written = tempfile.mkstemp(dir=folder, prefix=f"{name}.")
        try:
            with open(descriptor, "wb") as file:
                file.write(_seal(data) + b"\n" + data)
            os.replace(written, folder / name)
        except OSError:
            Path(written).unlink(missing_ok=True)
            raise


def _seal(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
