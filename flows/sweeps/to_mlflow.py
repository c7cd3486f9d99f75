"""A sweep in MLflow: one run with its tables and plot, which is the parent of the cells' runs."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vantage.flows.sweeps.report import Comparison, Row
from vantage.ledger import tracking

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.server import Server

log = logging.getLogger(__name__)

_NOTE = "mlflow.note.content"
_NOTE_LENGTH = 8000


class SweepLedger:
    """The record of one sweep. Like a run's ledger, its errors never stop the sweep; files have the same content."""

    def __init__(self, workspace: Path, experiment: str, sweep_id: str) -> None:
        self.workspace = workspace
        self.experiment = experiment
        self.sweep_id = sweep_id
        self.run_id: str | None = None
        """MLflow's id of the sweep's run; None: not created yet."""
        self._server: Server | None = None
        self._linked: set[str] = set()

    def record(
        self, folder: Path, rows: Sequence[Row], table: Sequence[Comparison], *, status: str, note: str
    ) -> None:
        """Update the sweep's run: its files, means and differences, and its cells' runs.

        Args:
            folder: folder with the run's artifacts.
            status: status in MLflow: RUNNING, FINISHED, FAILED or KILLED.
            note: Markdown for the run's page.
        """
        try:
            self._record(folder, rows, table, status, note)
        except Exception as error:  # no error of MLflow may stop a sweep
            self._server = None
            log.warning(
                "the sweep could not be sent to MLflow; %s has all of it: %s",
                folder,
                str(error).split("\n")[0],
            )

    def _record(
        self, folder: Path, rows: Sequence[Row], table: Sequence[Comparison], status: str, note: str
    ) -> None:
        tracking.set_up_client()
        from mlflow.entities import Metric, RunTag

        from vantage.ledger.to_mlflow.server import Server

        if self._server is None:
            uri = tracking.address(None, self.workspace)
            self._server = Server(uri, artifacts=self.workspace.absolute() / "mlartifacts")
        client, run_id = self._server.client, self._find_or_create(self._server)
        cells = {f"{row.arm}.{row.seed}": row for row in rows if row.mlflow_run_id}
        for name, row in cells.items():
            assert row.mlflow_run_id is not None
            if row.mlflow_run_id not in self._linked:
                tags = {
                    "vantage.sweep_id": self.sweep_id,
                    "vantage.arm": row.arm,
                    "vantage.seed": str(row.seed),
                }
                tags["mlflow.parentRunId"] = run_id
                client.log_batch(row.mlflow_run_id, tags=[RunTag(*tag) for tag in tags.items()])
                client.set_tag(run_id, f"vantage.cell.{name}", row.mlflow_run_id)
                self._linked.add(row.mlflow_run_id)
        began = client.get_run(
            run_id
        ).info.start_time  # with another time, a number that is sent again would be stored twice
        numbers = {
            f"{line.measure}.{line.arm}.{name}": getattr(line, name) for line in table for name in NUMBERS
        }
        metrics = [
            Metric(name, value, began, len(rows)) for name, value in numbers.items() if value is not None
        ]
        client.log_batch(run_id, metrics=metrics, tags=[RunTag(_NOTE, note[:_NOTE_LENGTH])])
        client.log_artifacts(run_id, str(folder))
        client.update_run(run_id, status="RUNNING")
        if status != "RUNNING":
            client.set_terminated(run_id, status)

    def _find_or_create(self, server: "Server") -> str:
        if self.run_id is None:
            experiment_id = server.experiment(self.experiment).experiment_id
            found = server.client.search_runs(
                [experiment_id], f"tags.`vantage.sweep` = '{self.sweep_id}'", max_results=1
            )
            tags = {
                "vantage.sweep": self.sweep_id,
                "mlflow.source.name": "vantage",
                "mlflow.source.type": "LOCAL",
            }
            run = (
                found[0]
                if found
                else server.client.create_run(experiment_id, tags=tags, run_name=self.sweep_id)
            )
            self.run_id = str(run.info.run_id)
        return self.run_id


NUMBERS = ("mean", "difference", "low", "high")
"""Fields of each comparison that become metrics of the sweep's run."""
