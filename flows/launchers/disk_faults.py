"""Which errors say that a disk is full, read-only or broken: libraries say so in their own ways."""

import errno
import os
import re
from collections.abc import Iterator

ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""No room, over the quota, a file over the limit, read-only, a broken device."""

_SAFETENSORS = re.compile(r"\(os error (\d+)\)")
_TORCH_WRITER = re.compile(r"inline_container\.cc.*unexpected pos|PytorchStreamWriter failed writing")
_SQLITE = ("database or disk is full", "disk I/O error", "attempt to write a readonly database")
_TOLD = tuple(os.strerror(number) for number in ERRNOS)


def is_disk_fault(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, says so."""
    return any(_says_so(each) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _says_so(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in ERRNOS
    # What only a library defines is known by its name: this module must load without any.
    kind, message = type(error).__name__, str(error)
    if kind == "SafetensorError":  # written in Rust: no OSError below it
        found = _SAFETENSORS.search(message)
        return found is not None and int(found[1]) in ERRNOS
    if kind in ("OperationalError", "DatabaseError"):  # sqlite3's and SQLAlchemy's
        return any(phrase in message for phrase in _SQLITE)
    if isinstance(error, RuntimeError):  # torch.save
        return _TORCH_WRITER.search(message) is not None or message.endswith(_TOLD)
    return False
