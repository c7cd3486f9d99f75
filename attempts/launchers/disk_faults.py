"""Recognise errors of storage (a full, read-only or broken disk; a bucket), which differ between libraries."""

import errno
import os
import re
from collections.abc import Iterator

from vantage.storage.durable_files import FolderGone

ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Error numbers: no space, over the quota, a file over the limit, a read-only file system, a broken device."""

_SAFETENSORS = re.compile(r"\(os error (\d+)\)")
_TORCH_WRITER = re.compile(r"inline_container\.cc.*unexpected pos|PytorchStreamWriter failed writing")
_SQLITE = ("database or disk is full", "disk I/O error", "attempt to write a readonly database")
_ERROR_MESSAGES = tuple(os.strerror(number) for number in ERRNOS)


def is_disk_fault(error: BaseException) -> bool:
    """Return whether the error, or one that it was raised from, is about the disk."""
    return any(_is_fault(each) for each in _chain(error))


def is_bucket_fault(error: BaseException) -> bool:
    """Return whether the error is one of the bucket's client: the network, the login, or a missing bucket."""
    kinds = [type(each) for each in _chain(error)]
    return any(kind.__name__ == "BucketNotFound" or kind.__module__.startswith("obstore") for kind in kinds)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the errors that it was raised from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _is_fault(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in ERRNOS or isinstance(error, FolderGone)
    # Errors of libraries are recognised by name: this module must load without them.
    kind, message = type(error).__name__, str(error)
    if kind == "SafetensorError":  # its library is in Rust: no OSError caused it
        found = _SAFETENSORS.search(message)
        return found is not None and int(found[1]) in ERRNOS
    if kind in ("OperationalError", "DatabaseError"):  # sqlite3's and SQLAlchemy's
        return any(phrase in message for phrase in _SQLITE)
    if isinstance(error, RuntimeError):  # torch.save
        return _TORCH_WRITER.search(message) is not None or message.endswith(_ERROR_MESSAGES)
    return False
