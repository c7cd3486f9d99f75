"""Read an outbox again: what a run recorded, operation by operation."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from vantage.ledger.entries import RunEntry, apply_operation
from vantage.ledger.operations import (
    FinishStage,
    MoveAlias,
    OpenRun,
    Operation,
    Publish,
    RecordReuse,
    RecordVerdicts,
    from_json,
)
from vantage.ledger.outbox import BEFORE
from vantage.schemas.records.artifacts import Artifact


class DamagedOutbox(ValueError):
    """An outbox that cannot be read, or whose operations cannot have happened in this order."""


@dataclass(frozen=True)
class OutboxLine:
    """A line of an outbox: one operation, and the run after it."""

    operation: Operation
    entry: RunEntry
    end: int
    """Byte offset of the end of the line."""
    is_chained: bool = False
    """Whether the line has the sha256 of earlier lines: this version wrote it, or a later one."""


@dataclass(frozen=True)
class Replay:
    """All operations of a run, line by line."""

    lines: tuple[OutboxLine, ...]
    changed: str = ""
    """Lines that were changed after they were written; empty: none, or an earlier version wrote the outbox."""
    is_chained: bool = False
    """Whether lines contain the sha256 of earlier lines: this version wrote them, or a later one."""

    @property
    def opened(self) -> OpenRun:
        """The first operation."""
        opening = self.lines[0].operation
        assert isinstance(opening, OpenRun), "checked when it was read"
        return opening

    @property
    def entry(self) -> RunEntry:
        """The run after all operations."""
        return self.lines[-1].entry

    @property
    def end(self) -> int:
        """Length of the outbox in bytes."""
        return self.lines[-1].end

    def artifact_of(self, stage: str) -> Artifact | None:
        """Return the artifact that was last recorded of a stage."""
        entry = self.entry.stages.get(stage)
        return None if entry is None else entry.artifact

    def finished(self, stage: str) -> FinishStage | None:
        """Return the end of the attempt that made the stage's artifact; None: the run did not make it, or died before this."""
        ends = (each.operation for each in reversed(self.lines))
        return next(
            (
                each
                for each in ends
                if isinstance(each, FinishStage) and each.stage == stage and each.artifact
            ),
            None,
        )

    def recorded_verdicts(self, stage: str) -> RecordVerdicts | None:
        """Return the newest verdicts of a stage."""
        ends = (each.operation for each in reversed(self.lines))
        return next((each for each in ends if isinstance(each, RecordVerdicts) and each.stage == stage), None)

    def is_reused(self, stage: str) -> bool:
        """Return whether the run has reused the stage's artifact from the store."""
        return any(
            isinstance(each.operation, RecordReuse) and each.operation.stage == stage for each in self.lines
        )

    def movements(self) -> Iterator[Publish | MoveAlias]:
        """Yield every operation that moved an alias."""
        for each in self.lines:
            if isinstance(each.operation, Publish | MoveAlias) and each.operation.alias:
                yield each.operation

    def publications(self) -> Iterator[tuple[Publish, RunEntry]]:
        """Yield each publication, with the run's state at that time."""
        for each in self.lines:
            if isinstance(each.operation, Publish):
                yield each.operation, each.entry


def read_replay(data: bytes, *, run_id: str) -> Replay:
    """Return the operations of an outbox; an incomplete last line is left out, as its writer was killed.

    Raises:
        DamagedOutbox: a line is no operation, or it is another run's outbox.
    """
    lines: list[OutboxLine] = []
    entry: RunEntry | None = None
    chain = _Chain()
    end = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            value = json.loads(line)
            is_chained = chain.add(number, line, value)
            operation = from_json(value)
            entry = apply_operation(entry, operation)
        except (ValueError, RecursionError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DamagedOutbox(f"line {number} of the outbox is no operation ({first})") from error
        lines.append(OutboxLine(operation, entry, end, is_chained))
    if not lines:
        raise DamagedOutbox("the outbox is empty")
    if lines[-1].entry.run_id != run_id:
        raise DamagedOutbox(f"the outbox is that of run {lines[-1].entry.run_id}")
    return Replay(tuple(lines), chain.changed, chain.is_begun)


class _Chain:
    """sha256 of all lines so far, with which each line is compared."""

    def __init__(self) -> None:
        self.changed = ""
        self.is_begun = False
        self._so_far = hashlib.sha256()

    def add(self, number: int, line: bytes, value: object) -> bool:
        """Compare the sha256 in a line with the lines before it; return whether the line has such a field, which is
        removed from its value."""
        before = value.pop(BEFORE, None) if isinstance(value, dict) else None
        if before is None and self.is_begun:
            self._change(f"line {number} has no {BEFORE}, and a line before it has")
        elif before is not None and before != self._so_far.hexdigest():
            self._change(f"the lines before line {number} are not those that were there when it was written")
        self.is_begun = self.is_begun or before is not None
        self._so_far.update(line)
        return before is not None

    def _change(self, said: str) -> None:
        self.changed = self.changed or f"{said}: a line was changed, swapped, added or taken out"
