"""Count attempts at a stage key: a small file with the number of the newest one, which only grows."""

import logging
import re
from pathlib import Path

from vantage.storage.durable_files import replace_file

SKIPPED_ATTEMPTS = 1000
"""Numbers to skip if the file cannot be read, so that no number is used twice."""

_COUNT = re.compile(rb"([0-9]{1,18})\n")

_log = logging.getLogger(__name__)


def read_count(path: Path) -> int | None:
    """Return the newest attempt, 0 before the first; None if the file is not one line with a number."""
    try:
        found = _COUNT.fullmatch(path.read_bytes())
    except FileNotFoundError:
        return 0
    except IsADirectoryError:
        found = None
    return int(found[1]) if found else None


def increment_count(path: Path, *, seen: int) -> int:
    """Write and return the number of a new attempt; the caller holds a lock.

    Args:
        seen: the newest attempt known from the ref and the staging folders.
    """
    newest = read_count(path)
    if newest is None:
        newest = seen + SKIPPED_ATTEMPTS
        _log.warning("%s cannot be read; attempts go on at %d, above every earlier one", path, newest + 1)
    attempt = max(newest, seen) + 1
    replace_file(path, f"{attempt}\n".encode())
    return attempt
