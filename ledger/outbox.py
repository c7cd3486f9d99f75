"""The ledger's outbox: all operations for MLflow, in order, written to disk before they are sent.

`outbox.jsonl` grows by whole lines. `sent.json` has, for each destination, the offset up to which lines were sent. A
process that is killed between the two sends the same line again, so applying a line twice must change nothing. Lines
that a destination refused permanently are in `refused.jsonl`.

Each line has the sha256 of all lines before it, so that an audit finds lines that were changed, swapped or taken out.

Only the process that executes a run appends to its outbox; any process may send, one at a time.
"""

import fcntl
import hashlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from vantage.storage.durable_files import make_folder, open_private, replace_file

Operation = dict[str, Any]

BEFORE = "sha256_before"
"""Field of a line: the sha256 of all lines before it. Lines of an earlier version have none."""

_ENDS: TypeAdapter[dict[str, int]] = TypeAdapter(
    dict[str, Annotated[int, Field(ge=0, le=2**62, strict=True)]]
)

_POLL_SECONDS = 0.02

log = logging.getLogger(__name__)


class OutboxBusy(RuntimeError):
    """Another process is sending this outbox."""


class Outbox:
    """One run's queue of operations; threads may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "outbox.jsonl"
        self._appending = threading.Lock()
        self._unwritten: list[Operation] = []
        self._before: hashlib._Hash | None = None
        """sha256 of all lines so far; None: they must be read before the next line is written."""
        self._warned = False

    def append(self, operation: Operation) -> None:
        """Append an operation; it is on disk when this returns.

        Raises:
            OSError: it could not be written. It will be written before the next operation, which may depend on it.
        """
        with self._appending:
            self._unwritten.append(operation)
            self._write()

    def write_rest(self) -> int:
        """Write operations that could not be written before; returns their number. Raises OSError if it fails again."""
        with self._appending:
            left = len(self._unwritten)
            if left:
                self._write()
        return left

    def _write(self) -> None:
        if self._before is None:
            make_folder(self.folder)
            self._before = hashlib.sha256(_without_half_written_line(self._path))
        try:
            while self._unwritten:
                line = _line({**self._unwritten[0], BEFORE: self._before.hexdigest()})
                append_line(self._path, line)
                self._before.update(line)
                del self._unwritten[0]
        except OSError:
            self._before = None
            raise

    def read(self, start: int = 0) -> Iterator[tuple[int, Operation]]:
        """Yield the operations from a byte offset on, each with the offset at which it ends.

        An incomplete last line is skipped: its writer has not finished, or was killed.

        Raises:
            ValueError: a line is no JSON.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            end = file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                try:
                    operation = operation_in(line)
                except RecursionError:
                    raise ValueError(
                        f"{self._path}: the line that ends at byte {end} is nested too deeply"
                    ) from None
                yield end, operation

    def sent(self, destination: str) -> int:
        """Return the byte offset up to which the destination has everything; 0 if none is stored, or it is invalid."""
        end = self._all_sent().get(destination, 0)
        return end if self._is_end_of_line(end) else 0

    def mark_sent(self, destination: str, end: int) -> None:
        """Store the byte offset up to which the destination has everything."""
        ends = json.dumps({**self._all_sent(), destination: end})
        replace_file(self.folder / "sent.json", ends.encode(), private=True)

    def is_pending(self, destination: str) -> bool:
        """Return whether there may be unsent operations for the destination; cheap, compares two files' sizes."""
        return self.is_longer_than(self.sent(destination))

    def is_longer_than(self, end: int) -> bool:
        """Return whether there is anything after this byte offset."""
        return self._path.exists() and self._path.stat().st_size > end

    def is_unsent(self) -> bool:
        """Return whether there are operations, and no destination has all of them."""
        if not self._path.exists():
            return False
        return self._path.stat().st_size > max(map(self.sent, self._all_sent()), default=0)

    def mark_refused(self, destination: str, operation: Operation, error: str) -> None:
        """Record an operation that the destination refused permanently, with the error; sending continues."""
        refusal = {"destination": destination, "error": error, "operation": operation}
        append_line(self.folder / "refused.jsonl", _line(refusal))

    def set_aside(self) -> Path:
        """Rename an unreadable outbox, so that a new one can start; returns its new folder."""
        names = (self.folder.with_name(f"{self.folder.name}-unreadable-{i}") for i in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        self.folder.rename(aside)
        return aside

    @contextmanager
    def sending(self, *, wait_seconds: float) -> Iterator[bool]:
        """Yield whether this process has the lock for sending; the kernel releases it when the process dies."""
        lock = os.open(self.folder / "sending.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            yield _lock_within(lock, wait_seconds)
        finally:
            os.close(lock)

    def _all_sent(self) -> dict[str, int]:
        """Return destination → offset; empty if the file cannot be read: operations that are sent again change nothing."""
        path = self.folder / "sent.json"
        try:
            return _ENDS.validate_json(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, IsADirectoryError):
            if not self._warned:
                log.warning(
                    "%s cannot be read; its run is sent to MLflow again, which changes nothing there", path
                )
            self._warned = True
            return {}

    def _is_end_of_line(self, end: int) -> bool:
        if end == 0:
            return True
        try:
            with self._path.open("rb") as file:
                file.seek(end - 1)
                return file.read(1) == b"\n"
        except FileNotFoundError:
            return False


def operation_in(line: bytes) -> Operation:
    """Return the operation of a line of an outbox; ValueError if it is no JSON."""
    operation: Operation = json.loads(line)
    if isinstance(operation, dict):
        operation.pop(BEFORE, None)
    return operation


def _line(value: Operation) -> bytes:
    return json.dumps(value).encode() + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file of its owner only; it is on disk when this returns."""
    with open(path, "ab", opener=open_private) as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _without_half_written_line(path: Path) -> bytes:
    """Return the content of the file, without the incomplete line of a killed writer."""
    if not path.exists():
        return b""
    with path.open("r+b") as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        file.truncate(end)
    return data[:end]


def _lock_within(lock: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True
