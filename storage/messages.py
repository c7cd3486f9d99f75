"""Exchange small files between a run and one of its attempts on another machine, in the storage that both reach.

messages/<stage key>/<number>/request.json    who asked for the attempt; created once, so one of several runs wins
messages/<stage key>/<number>/begun.json      the computation has begun
messages/<stage key>/<number>/beat            a counter that the attempt raises as long as it lives
messages/<stage key>/<number>/log.txt         output of the attempt
messages/<stage key>/<number>/stop            written by a run that asks the attempt to save and stop
messages/<stage key>/<number>/outcome.json    how the attempt ended; created once
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vantage.storage.records import Conflict, read_record, replace_record

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Remote

_FOLDER = "messages"


@dataclass(frozen=True)
class Messages:
    """The messages of one attempt that a run has sent to a work pool."""

    remote: "Remote"
    name: str
    """Stage key and number of the request: ``<stage key>/<number>``."""

    @property
    def number(self) -> int:
        """Return the number of the request."""
        return int(self.name.rpartition("/")[2])

    def read(self, what: str) -> bytes | None:
        """Return a message; None if there is none."""
        data, _ = read_record(self.remote, self._path(what))
        return data

    def create(self, what: str, data: bytes) -> bool:
        """Write a message that does not exist yet; returns False if another was faster."""
        try:
            replace_record(self.remote, self._path(what), data, None)
        except Conflict:
            return False
        return True

    def write(self, what: str, data: bytes) -> None:
        """Write or replace a message."""
        import obstore

        obstore.put(self.remote, self._path(what), data)

    def _path(self, what: str) -> str:
        return f"{_FOLDER}/{self.name}/{what}"


def newest_number(remote: "Remote", stage_key: str) -> int:
    """Return the highest number of a request for the stage key; 0: there is none."""
    import obstore

    prefixes = obstore.list_with_delimiter(remote, f"{_FOLDER}/{stage_key}/")["common_prefixes"]
    numbers = (str(prefix).rstrip("/").rpartition("/")[2] for prefix in prefixes)
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def newest_messages(remote: "Remote", stage_key: str) -> Messages | None:
    """Return the messages of the newest request for the stage key; None: there is none."""
    number = newest_number(remote, stage_key)
    return messages_of(remote, stage_key, number) if number else None


def messages_of(remote: "Remote", stage_key: str, number: int) -> Messages:
    """Return the messages of a numbered request for the stage key."""
    return Messages(remote, f"{stage_key}/{number}")


def logs_with(logs: bytes, number: int, log: bytes) -> bytes:
    """Return the logs of several attempts with that of request ``number`` added, under a line that names it."""
    end = b"" if not logs or logs.endswith(b"\n") else b"\n"
    return logs + end + _title(number) + log


def logs_before(logs: bytes, number: int) -> bytes:
    """Return the part of several attempts' logs before the log of request ``number``."""
    return logs.partition(_title(number))[0]


def _title(number: int) -> bytes:
    return f"== request {number} for a worker\n".encode()
