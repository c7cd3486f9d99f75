"""The number of the newest attempt at a stage key: a small file that only ever counts up."""

import logging
import re
from pathlib import Path

from storage.durable_files import replace_file

LOST_ATTEMPTS = 1000
"""What is skipped where the file cannot be read: an attempt of which nothing else is left is never counted twice."""

_COUNT = re.compile(rb"([0-9]{1,18})\n")

_log = logging.getLogger(__name__)


def read_count(path: Path) -> int | None:
    """The newest attempt, 0 before there is one; None where the file does not hold a number with its line's end."""
    try:
        found = _COUNT.fullmatch(path.read_bytes())
    except FileNotFoundError:
        return 0
    except IsADirectoryError:
        found = None
    return int(found[1]) if found else None


def count_on(path: Path, *, seen: int) -> int:
    """Write and return the number of a new attempt; whoever calls holds a lock.

    Args:
        seen: the newest attempt that has left other traces.
    """
    newest = read_count(path)
    if newest is None:
        newest = seen + LOST_ATTEMPTS
        _log.warning("%s cannot be read; attempts go on at %d, above every earlier one", path, newest + 1)
    attempt = max(newest, seen) + 1
    replace_file(path, f"{attempt}\n".encode())
    return attempt
