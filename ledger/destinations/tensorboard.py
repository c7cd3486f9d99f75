"""Event files of TensorBoard with the metrics of a run, one folder for each stage.

A file's bytes are a function of the run's outbox alone. So an operation that is applied again finds its own bytes and writes
nothing, a file that a kill has cut short is completed, and no point is ever in a curve twice.
"""

import io
import os
from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from vantage.ledger.entries import RunEntry
from vantage.ledger.expected.changes import RunChange, changes
from vantage.ledger.operations import LogMetrics, MetricRow, OpenRun, Operation

_VERSION = "brain.Event:2"
"""Format of the file, as its first event names it."""


class EventFiles:
    """A folder of event files, ``RUN/STAGE/events.out.tfevents.…``."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def address(self) -> str:
        """Path of the folder."""
        return str(self._folder)

    def copy_of(self, opening: OpenRun) -> "RunEvents":
        """Return the event files of a run."""
        return RunEvents(self._folder / opening.run_id, began=opening.time)


class RunEvents:
    """The event files of one run: one for each stage, and one for the metrics that compare runs."""

    def __init__(self, folder: Path, *, began: int) -> None:
        """Open the folder; ``began``: time of the run's first opening (milliseconds since 1970), which is part of file
        names.
        """
        self._folder = folder
        self._name = f"events.out.tfevents.{began // 1000}.vantage"
        self._files: dict[str | None, _EventFile] = {}
        self._headlines: set[tuple[str | None, str, int, int]] = set()
        """Stage, metric, time and step of the rows that several operations may contain."""

    def apply(self, entry: RunEntry, operation: Operation, *, is_sent: bool) -> None:
        """Write the rows that the operation adds to the run's curves.

        A metric's rows up to a checkpoint come once; its headline value comes with each operation that names the artifact.
        """
        for change in changes(entry, operation):
            if not isinstance(change, RunChange):
                continue
            rows = list(change.rows)
            if change.shown is not None and not change.shown.is_reused:
                rows += change.shown.rows
            if not isinstance(operation, LogMetrics):
                rows = self._new_headlines(change.stage, rows)
            if rows:
                self._file_of(change.stage).write(rows)

    def _new_headlines(self, stage: str | None, rows: Iterable[MetricRow]) -> list[MetricRow]:
        fresh = []
        for row in rows:
            name, _, time, step = row
            if (known := (stage, name, time, step)) not in self._headlines:
                self._headlines.add(known)
                fresh.append(row)
        return fresh

    def _file_of(self, stage: str | None) -> "_EventFile":
        if stage not in self._files:
            folder = self._folder if stage is None else self._folder / stage
            self._files[stage] = _EventFile(folder / self._name)
        return self._files[stage]


class _EventFile:
    """One event file, written from its beginning; bytes that are there already are compared and kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0

    def write(self, rows: Iterable[MetricRow]) -> None:
        """Put the rows after those that were written so far."""
        data = io.BytesIO()
        records = RecordWriter(data)
        if self._end == 0:
            records.write(_serialized(Event(file_version=_VERSION)))
        for name, value, time, step in rows:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            records.write(_serialized(Event(wall_time=time / 1000, step=step, summary=summary)))
        self._put(data.getvalue())

    def _put(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as file:
            file.seek(self._end)
            if file.read(len(data)) != data:
                file.seek(self._end)
                file.truncate()
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        self._end += len(data)


def _serialized(event: Event) -> bytes:
    return bytes(event.SerializeToString(deterministic=True))
