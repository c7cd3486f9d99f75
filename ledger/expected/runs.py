"""Compute what MLflow must show of a run: everything that the run's operations changed, and nothing else."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from vantage.ledger.expected.artifact_fields import ROLE, ExpectedDataset, ExpectedModel
from vantage.ledger.expected.changes import (
    RUNNING,
    AliasChange,
    Change,
    Closing,
    FileChange,
    RunChange,
    ShownArtifact,
    VersionChange,
    changes,
)
from vantage.ledger.expected.system_metrics import SYSTEM_METRICS
from vantage.ledger.operations import MetricRow, OpenRun
from vantage.ledger.replay import OutboxLine

Row = tuple[str, int, int, float]
"""Metric, time (milliseconds since 1970), step and value; two rows that agree in all four are one row in MLflow."""

_MAX_FLOAT = 1.7976931348623157e308
"""Value that MLflow stores for infinity."""
KILLED = "KILLED"
"""MLflow's status of a run whose process died."""


@dataclass
class ExpectedRun:
    """One of MLflow's runs: a stage's run, or the parent run."""

    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    rows: set[Row] = field(default_factory=set)
    system_rows: set[Row] = field(default_factory=set)
    """Readings of the machine. They belong to no step, so no audit compares them."""
    datasets: dict[str, dict[str, str]] = field(default_factory=dict)
    """Content digest → tags of the dataset's input."""
    optional_datasets: dict[str, dict[str, str]] = field(default_factory=dict)
    """Tags of a source file's input, for a run that an earlier version sent: still older versions sent no such
    input."""
    dataset_fields: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Content digest → MLflow's own fields of the dataset, one entry for each step that made it."""
    model: ExpectedModel | None = None
    """The logged model of the artifact; None: the artifact is no model."""
    optional_tags: dict[str, str] = field(default_factory=dict)
    """Tags of a reused stage that are there only if the server did not know who had made the artifact."""
    optional_rows: set[Row] = field(default_factory=set)
    started: int = 0
    """Milliseconds since 1970."""
    status: str = RUNNING
    ended: int | None = None
    """Time of the end; None: the run is still running."""
    interrupted: str | None = None
    """Reason why the run was closed before its end; another run may have closed it first, with another reason."""
    files: set[str] = field(default_factory=set)
    """Names of files among the run's artifacts; a file that was removed before it was sent is not included."""


def expected_runs(lines: Iterable[OutboxLine]) -> dict[str | None, ExpectedRun]:
    """Return stage → its run after these operations; None → the parent run."""
    expected = _Expected()
    for each in lines:
        expected.add(each)
    return expected.runs


def own_tags(opening: OpenRun, stage: str | None) -> dict[str, str]:
    """Return the tags with which the run of a stage is created (None: the parent run); the run is found again by them."""
    named = {"vantage.recipe": opening.name} if stage is None else {"vantage.stage": stage}
    return {"vantage.run_id": opening.run_id, **opening.origin, **named}


def row_of(name: str, value: float, time: int, step: int) -> Row:
    """Return a row as MLflow gives it back: NaN as ``nan``, infinity as the largest number."""
    if math.isnan(value):
        return name, time, step, math.nan  # always the same object, since no NaN equals another
    if math.isinf(value):
        value = math.copysign(_MAX_FLOAT, value)
    return name, time, step, value


class _Expected:
    """The runs so far."""

    def __init__(self) -> None:
        self.runs: dict[str | None, ExpectedRun] = {}
        self._opening: OpenRun | None = None

    def add(self, line: OutboxLine) -> None:
        """Add the changes of one operation."""
        if self._opening is None and isinstance(line.operation, OpenRun):
            self._opening = line.operation
        for change in changes(line.entry, line.operation):
            self._add(change, is_chained=line.is_chained)

    def _add(self, change: Change, *, is_chained: bool) -> None:
        match change:
            case RunChange():
                self._change(self._run(change.stage, change.time), change, is_chained=is_chained)
            case Closing() if change.is_own:
                self._close(change)
            case VersionChange() | AliasChange():
                self._run(change.operation.stage, change.operation.time)
            case FileChange():
                self._run(change.stage, change.time).files.add(change.name)
            case _:  # pages are not compared here, and another run has its own outbox
                pass

    def _run(self, stage: str | None, time: int) -> ExpectedRun:
        if stage not in self.runs:
            assert self._opening is not None, "an outbox begins with it"
            self.runs[stage] = ExpectedRun(own_tags(self._opening, stage), started=time)
        return self.runs[stage]

    def _change(self, run: ExpectedRun, change: RunChange, *, is_chained: bool) -> None:
        run.tags |= change.tags
        run.params |= change.params
        _add_rows(run, change.rows)
        for dataset in change.datasets:
            _add_dataset(run, dataset, is_optional=dataset.is_source and not is_chained)
        if change.shown is not None:
            _add_artifact(run, change.shown)
        if change.status is not None:
            run.status, run.ended = change.status, change.ended

    def _close(self, closing: Closing) -> None:
        """Close the stages that still run; the parent run goes on."""
        for stage, run in self.runs.items():
            if stage is not None and run.status == RUNNING:
                run.status, run.ended, run.interrupted = KILLED, closing.time, closing.reason


def _add_rows(run: ExpectedRun, rows: Iterable[MetricRow]) -> None:
    for name, value, time, step in rows:
        place = run.system_rows if name.startswith(SYSTEM_METRICS) else run.rows
        place.add(row_of(name, value, time, step))


def _add_dataset(run: ExpectedRun, dataset: ExpectedDataset, *, is_optional: bool) -> None:
    place = run.optional_datasets if is_optional else run.datasets
    place[dataset.digest] = {name: value for name, value in dataset.tags.items() if name != ROLE}
    run.dataset_fields.setdefault(dataset.digest, []).append(dict(dataset.fields))


def _add_artifact(run: ExpectedRun, shown: ShownArtifact) -> None:
    rows = {row_of(name, value, time, step) for name, value, time, step in shown.rows}
    if shown.is_reused:
        run.optional_tags |= shown.tags
        run.optional_rows |= rows
    else:
        run.tags |= shown.tags
        run.rows |= rows
    run.model = shown.model or run.model
