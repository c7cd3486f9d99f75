"""Read the course of a run from its outbox: curves, attempts, publications and openings, whether or not MLflow has them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from vantage.ledger.operations import (
    FinishRun,
    FinishStage,
    LogMetrics,
    OpenRun,
    OpenStage,
    Operation,
    Publish,
)
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.facts import Facts

Row = tuple[int, int, float]
"""Step, time (milliseconds since 1970), value."""


@dataclass
class Attempt:
    """One attempt at a stage."""

    number: int
    started: int
    """Milliseconds since 1970, like all times here."""
    ended: int | None = None
    """Time of the end; None: the run is still running, or its process died."""
    last_measured: int | None = None
    """Time of the attempt's last measurement; None: it has measured nothing."""
    energy: Energy | None = None
    """Energy of the attempt; None: it was not measured, or the process died before it was recorded."""
    facts: Facts = field(default_factory=dict)
    """Facts of the machine when the attempt began; empty where ``energy`` is None."""

    @property
    def seconds(self) -> float:
        """Return the time up to its end, or up to its last measurement if no end is recorded."""
        last = self.ended if self.ended is not None else self.last_measured
        return 0.0 if last is None else max(last - self.started, 0) / 1000


@dataclass
class RunHistory:
    """The course of a run, by stage."""

    curves: dict[str, dict[str, list[Row]]] = field(default_factory=dict)
    """Stage → metric → rows, in the order of their steps."""
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    published: dict[str, Publish] = field(default_factory=dict)
    """Registered model → the last publication under this name."""
    origin: dict[str, str] = field(default_factory=dict)
    """User and version of the code when the run was last opened."""
    openings: int = 0
    """Number of times that the run was started or resumed."""
    began: int | None = None
    """Time of the first opening."""
    finished: int | None = None
    """Time of the last end; None: no end is recorded since the last opening."""

    def add(self, operation: Operation) -> None:
        """Add the next operation."""
        match operation:
            case OpenRun():
                self.origin, self.openings = operation.origin, self.openings + 1
                self.began = operation.time if self.began is None else self.began
                self.finished = None
            case FinishRun():
                self.finished = operation.time
            case OpenStage():
                begun = Attempt(operation.attempt, operation.time)
                self.attempts.setdefault(operation.stage, []).append(begun)
            case LogMetrics():
                curves = self.curves.setdefault(operation.stage, {})
                for name, value, time, step in operation.rows:
                    curves.setdefault(name, []).append((step, time, value))
                times = [time for _, _, time, _ in operation.rows]
                for attempt in self.attempts.get(operation.stage, [])[-1:]:
                    attempt.last_measured = max(times, default=attempt.last_measured)
            case FinishStage():
                for attempt in self.attempts.get(operation.stage, [])[-1:]:
                    attempt.ended, attempt.energy = operation.time, operation.energy
                    attempt.facts = operation.facts
            case Publish():
                self.published[operation.registered_model] = operation
            case _:
                pass


def history_of(operations: Iterable[Operation]) -> RunHistory:
    """Collect the history of a run from its operations, in their order."""
    history = RunHistory()
    for operation in operations:
        history.add(operation)
    return history
