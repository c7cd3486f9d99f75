"""Faults of a row, or of a file as a whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

_SHOWN_CHARACTERS = 200


class UnreadableFile(ValueError):
    """A file as a whole does not have the format that its name claims."""


@dataclass(frozen=True)
class Fault:
    """A row cannot be read, or has other content than required."""

    reason: str
    """Reason, the same for all rows with this fault; rows are counted by it."""
    shown: str
    """The text in the row, shortened."""


class Message(Enum):
    """First items of the messages from the process that reads a file."""

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
