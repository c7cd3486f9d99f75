"""The journal of a stage's metrics, of which MLflow gets a copy.

It is a JSONL file next to the checkpoints, one line a step. A checkpoint stores the journal's offset. An attempt that
resumes from it truncates the journal there, so that no step is in it twice. Only lines before the offset of a committed
checkpoint are sent to the ledger.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vantage.storage.durable_files import sync_folder


@dataclass(frozen=True)
class Entry:
    """One line of a journal."""

    step: int
    time: float
    """Seconds since 1970, set by the writer."""
    metrics: dict[str, float]


class Journal:
    """The writer of a journal; one writer at a time.

    Opening removes an incomplete last line, which a kill can leave.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        is_new = not path.exists()
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - open as long as the journal lives
        self._cut(end_of_last_line(self._file.fileno()))
        if is_new:
            sync_folder(path.parent)

    @property
    def offset(self) -> int:
        """Number of bytes written so far: where the next line begins."""
        return self._offset

    def append(self, step: int, metrics: Mapping[str, float | None], *, time: float) -> None:
        """Write one line to the kernel, so that a kill does not lose it.

        Args:
            step: the stage's number of optimiser steps or iterations.
            metrics: name → value; None: undefined, not written.
            time: seconds since 1970.
        """
        line = {
            "step": step,
            "time": time,
            "metrics": {name: _to_json(value) for name, value in metrics.items() if value is not None},
        }
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        written = self._file.write(data)
        if written != len(data):  # the disk is full: leave no part of a line behind
            self._cut(self._offset)
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes of a line could be written")
        self._offset += len(data)

    def sync(self) -> int:
        """Wait until all lines are on the disk, and return the offset to store in a checkpoint."""
        os.fsync(self._file.fileno())
        return self._offset

    def truncate(self, offset: int) -> None:
        """Remove everything after ``offset``, a value of ``self.offset`` or ``sync``.

        Raises:
            ValueError: the journal is shorter, or no line ends at the offset.
        """
        is_inside = 0 <= offset <= self._offset
        if not is_inside or (offset and os.pread(self._file.fileno(), 1, offset - 1) != b"\n"):
            raise ValueError(
                f"{self.path} has {self._offset} bytes and no line that ends at offset={offset}, so it is not the "
                "journal of this checkpoint; remove the folder of both to start the stage from the beginning"
            )
        self._cut(offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _cut(self, offset: int) -> None:
        os.ftruncate(self._file.fileno(), offset)
        self._offset = offset


def read(path: Path, start_offset: int = 0, end_offset: int | None = None) -> Iterator[Entry]:
    """Yield the complete lines between two offsets, in order; an incomplete last line is skipped.

    Raises:
        FileNotFoundError: there is no journal.
        ValueError: a line is not an entry.
    """
    with open(path, "rb") as file:
        offset = file.seek(start_offset)
        for line in file:
            if (end_offset is not None and offset + len(line) > end_offset) or not line.endswith(b"\n"):
                return
            yield _parse(line, path, offset)
            offset += len(line)


def _to_json(value: float) -> float | str:
    """Return finite numbers as they are, and ``nan``, ``inf`` and ``-inf`` as strings, since JSON has no such numbers."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _parse(line: bytes, path: Path, offset: int) -> Entry:
    try:
        content = json.loads(line)
        metrics = {name: float(value) for name, value in content["metrics"].items()}
        return Entry(step=int(content["step"]), time=float(content["time"]), metrics=metrics)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path}: the line at offset {offset} is not a journal entry; remove {path.parent} to begin the stage anew"
        ) from error


def end_of_last_line(descriptor: int) -> int:
    """Return the offset after the last newline, searched from the end in blocks."""
    end, piece = os.fstat(descriptor).st_size, 1 << 16
    while end:
        start = max(end - piece, 0)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
