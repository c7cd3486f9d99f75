"""What a run told its ledger: curves, attempts, publications. The outbox has all of it, whether or not MLflow has."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vantage.ledger.operations import (
    FinishStage,
    LogMetrics,
    OpenRun,
    OpenStage,
    Operation,
    Publish,
    from_json,
)
from vantage.runs.record import RunRecord
from vantage.runs.run import read_run
from vantage.runs.run_records import OUTBOX
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.energy import Energy
from vantage.storage.refs import DamagedRef


class DamagedOutbox(OSError):
    """The ledger of a run cannot be read."""


Row = tuple[int, int, float]
"""Step, time (milliseconds since 1970), value."""


@dataclass
class Attempt:
    """One attempt at a stage."""

    number: int
    started: int
    """Milliseconds since 1970, as all times here."""
    ended: int | None = None
    """None: its process died, or it runs."""
    last_told: int | None = None
    """When it last measured something."""
    energy: Energy | None = None
    """None: not measured, or its process died before it could be told."""

    @property
    def seconds(self) -> float:
        """Up to its end, or to the last thing that was heard of it."""
        last = self.ended if self.ended is not None else self.last_told
        return 0.0 if last is None else max(last - self.started, 0) / 1000


@dataclass
class Told:
    """What a run told its ledger, by stage."""

    curves: dict[str, dict[str, list[Row]]] = field(default_factory=dict)
    """Stage → metric → rows, in the order of their steps."""
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    published: dict[str, Publish] = field(default_factory=dict)
    """Registered model → the last publication under this name."""
    origin: dict[str, str] = field(default_factory=dict)
    """User and version of the code when the run was last opened."""
    openings: int = 0
    """How often the run was started or resumed."""

    def add(self, operation: Operation) -> None:
        """Add the next operation."""
        match operation:
            case OpenRun():
                self.origin, self.openings = operation.origin, self.openings + 1
            case OpenStage():
                begun = Attempt(operation.attempt, operation.time)
                self.attempts.setdefault(operation.stage, []).append(begun)
            case LogMetrics():
                curves = self.curves.setdefault(operation.stage, {})
                for name, value, time, step in operation.rows:
                    curves.setdefault(name, []).append((step, time, value))
                for attempt in self.attempts.get(operation.stage, [])[-1:]:
                    attempt.last_told = max(time for _, _, time, _ in operation.rows)
            case FinishStage():
                for attempt in self.attempts.get(operation.stage, [])[-1:]:
                    attempt.ended, attempt.energy = operation.time, operation.energy
            case Publish():
                self.published[operation.registered_model] = operation
            case _:
                pass


def told_by(workspace: Workspace, run_id: str) -> Told:
    """What the run told; nothing where its ledger was removed by ``vantage gc``. DamagedOutbox: it cannot be read."""
    told = Told()
    try:
        for operation in _operations(workspace.records.read_outbox(run_id) or b""):
            told.add(from_json(operation))
    except ValueError as error:
        raise DamagedOutbox(
            f"{OUTBOX} of run {run_id} cannot be read ({str(error).splitlines()[0]})"
        ) from error
    return told


def _operations(lines: bytes) -> Iterable[Mapping[str, Any]]:
    """The operations of whole lines; the last may be only half written."""
    return (json.loads(line) for line in lines.splitlines(keepends=True) if line.endswith(b"\n"))


def maker_of(workspace: Workspace, record: RunRecord, stage_key: str) -> tuple[str, str] | None:
    """(Run, step) that made the artifact which this run has reused; None: not known any longer."""
    try:
        ref = workspace.storage.find(stage_key)
        if ref is None or ref.run_id == record.run_id:
            return None
        made_by = read_run(workspace, ref.run_id)
    except (DamagedRef, RunError):
        return None
    steps = [step for step, stage in made_by.stages.items() if stage.stage_key == stage_key]
    return (made_by.run_id, steps[0]) if steps else None
