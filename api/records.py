"""Runs as they are recorded: outcome, metrics, curves, artifacts and the report of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vantage.api.places import Place, workspace_of
from vantage.runs.history import RunHistory
from vantage.runs.names import named_run
from vantage.runs.record import RunRecord, RunStatus, StageRecord, StageStatus
from vantage.runs.view import Broken, Missing, RunView
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.artifacts import StoredArtifact
from vantage.schemas.records.verdicts import Verdict

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")


def open_run(named: str = "latest", *, workspace: Place = None) -> "Run":
    """Return a run of a workspace.

    Args:
        named: its id, the beginning of one, its number, or ``latest``.
        workspace: a folder or a bucket.

    Raises:
        ValueError: there is no such run, or several.
    """
    place = workspace_of(workspace)
    return Run(place, named_run(place, named, "open_run"))


class Run:
    """A run as it was recorded when it was opened; ``refresh`` reads it again."""

    def __init__(self, workspace: Workspace, run_id: str) -> None:
        self._workspace = workspace
        self.id = run_id
        """Its id, as in ``vantage status``."""
        self.record  # noqa: B018  # a run that cannot be read is refused here

    @cached_property
    def record(self) -> RunRecord:
        """Content of ``run.json``."""
        return _found(self._view.record)

    @property
    def status(self) -> RunStatus:
        """``running``, ``completed``, ``gate_closed``, ``waiting_approval``, ``failed``, ``resumable`` or ``removed``."""
        return self.record.status

    @property
    def stages(self) -> Mapping[str, "Stage"]:
        """Name → step, in the order of the recipe; steps for the model and for the data are among them."""
        return {name: Stage(self, name) for name in self.record.stages}

    def stage(self, name: str) -> "Stage":
        """Return one step. Raises KeyError if the run has none of this name."""
        if name not in self.record.stages:
            raise KeyError(f"run {self.id} has no stage {name!r}; it has {', '.join(self.record.stages)}")
        return Stage(self, name)

    def metrics(self) -> "pandas.DataFrame":
        """Return the metrics of all stages: a row for each stage and metric, with the bounds of its interval at 95 %."""
        import pandas

        rows = [
            (name, metric, value, *(stage.intervals.get(metric) or (None, None)))
            for name, stage in self.record.stages.items()
            for metric, value in stage.metrics.items()
        ]
        return pandas.DataFrame(rows, columns=["stage", "metric", "value", "lower", "upper"])

    def report(self, file: str | Path | None = None) -> Path:
        """Write the report as one HTML page, which needs no other file and no network; returns its absolute path.

        Args:
            file: where to; None: ``report.html`` in the run's folder.
        """
        from vantage.review.reports.files import write_report

        return write_report(self._workspace, self.id, None if file is None else Path(file)).absolute()

    def refresh(self) -> "Run":
        """Return the run as it is recorded now."""
        return Run(self._workspace, self.id)

    @cached_property
    def _view(self) -> RunView:
        return RunView(self._workspace, self.id)

    @property
    def _history(self) -> RunHistory:
        return _found(self._view.history)

    def __repr__(self) -> str:
        return "\n".join(
            [f"run {self.id}: {self.status}", *(f"  {stage!r}" for stage in self.stages.values())]
        )


@dataclass(frozen=True)
class Stage:
    """A step of a run."""

    run: Run
    name: str

    @property
    def record(self) -> StageRecord:
        """Everything that the run has recorded of it."""
        return self.run.record.stages[self.name]

    @property
    def status(self) -> StageStatus:
        """``completed``, ``reused``, ``gate_closed``, ``failed`` and others."""
        return self.record.status

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Metric → value of the finished stage; docs/metrics.md names each with its unit. None: it could not be measured."""
        return self.record.metrics

    @property
    def intervals(self) -> Mapping[str, tuple[float, float]]:
        """Metric → its interval at 95 %, for the metrics that are printed with one."""
        return self.record.intervals

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of its gates."""
        return self.record.verdicts

    @property
    def artifact(self) -> StoredArtifact:
        """Return the artifact that it made. Raises ValueError if there is none, or none any longer."""
        return _found(self.run._view.artifact(self.name))

    @property
    def curves(self) -> tuple[str, ...]:
        """Names of its curves."""
        return tuple(self.run._history.curves.get(self.name, {}))

    def curve(self, name: str) -> "pandas.Series[float]":
        """Return a curve of training: index ``step``, values in the metric's own unit.

        Raises:
            KeyError: the stage has no such curve; a stage that was reused has those of the run that computed it.
        """
        return self.curve_frame(name)[name]

    def curve_frame(self, *names: str) -> "pandas.DataFrame":
        """Return several curves as columns over the index ``step``; without names: all. A step without a value has NaN."""
        import pandas

        run, step = self._computed_by
        found = run.curves.get(step, {})
        unknown = [name for name in names if name not in found]
        if unknown:
            raise KeyError(
                f"{self.name} of run {self.run.id} has no curve {unknown[0]!r}; it has {', '.join(sorted(found)) or 'none'}"
            )
        columns = {
            name: pandas.Series({at: value for at, _, value in found[name]}, dtype="float64")
            for name in names or found
        }
        return pandas.DataFrame(columns).rename_axis("step").sort_index()

    @property
    def _computed_by(self) -> tuple[RunHistory, str]:
        """The history of the run that computed it, and its name there."""
        own = self.run._history
        if self.name in own.curves or self.status != "reused":
            return own, self.name
        maker = _found(self.run._view.maker(self.name))
        return _found(maker.run.history), maker.step

    def __repr__(self) -> str:
        from vantage.runs.console import outcome_of

        said = "; ".join(outcome_of(self.record).splitlines()) or (self.record.reason or "")
        return f"{self.name}: {self.status}" + (f", {said}" if said else "")


def _found(value: T | Missing | Broken) -> T:
    """Return what was found. Raises RunError with the reason if it was not."""
    if isinstance(value, Missing | Broken):
        raise RunError(str(value))
    return value
