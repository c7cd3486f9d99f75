"""The faults of a row, or of a file as a whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

_SHOWN_CHARACTERS = 200


class UnreadableFile(ValueError):
    """A file that is, as a whole, not of the kind that its name promises."""


@dataclass(frozen=True)
class Fault:
    """A row that cannot be read, or holds something else than what is asked of it."""

    reason: str
    """The same for all rows with this fault: it is what they are counted by."""
    shown: str
    """The text that is there, shortened."""


class Message(Enum):
    """First items of what the process that reads a file sends."""

    ROWS = "some rows; none at the end"
    UNREADABLE = "why the file is refused"
    DISK_FAULT = "an errno and its text"
    READ = "a place in the file and how many bytes are wanted from there"


SourceRow = Mapping[str, Any] | Fault


def shown(text: bytes | str) -> str:
    """Return the beginning of a row, in characters that can be shown."""
    start = text[: 4 * _SHOWN_CHARACTERS]
    if isinstance(start, str):
        start = start.encode("utf-8", "surrogateescape")
    found = " ".join(start.decode("utf-8", "backslashreplace").split())
    return found if len(found) <= _SHOWN_CHARACTERS else f"{found[:_SHOWN_CHARACTERS]}…"
