"""Find MLflow's runs for one Vantage run and its stages: found by tag, created if missing, closed when stale."""

from collections.abc import Iterator, Mapping, Sequence

from mlflow import entities
from mlflow.tracking import MlflowClient

from vantage.ledger.expected.runs import own_tags
from vantage.ledger.operations import OpenRun


class Runs:
    """MLflow's runs for one Vantage run, all in one experiment; results are cached until ``forget``."""

    def __init__(self, client: MlflowClient, experiment_id: str, opening: OpenRun) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self._opening = opening
        self._ids: dict[str | None, str] | None = None

    @property
    def ids(self) -> Mapping[str | None, str]:
        """Stage → MLflow's id of its run; None → id of the parent run."""
        if self._ids is None:
            runs = list(search(self._client, [self._experiment_id], "vantage.run_id", self._opening.run_id))
            self._ids = {run.data.tags.get("vantage.stage"): run.info.run_id for run in reversed(runs)}
        return self._ids

    def forget(self) -> None:
        """Clear the cache."""
        self._ids = None

    def page(self, stage: str | None) -> str | None:
        """Return the page of a stage's run (None: of the parent run) within MLflow's site."""
        run_id = self.ids.get(stage)
        return page_of(self._experiment_id, run_id) if run_id else None

    def run_of(self, stage: str | None, time: int) -> str:
        """Return MLflow's id of the stage's run (None: of the parent run), created if missing."""
        if stage in self.ids:
            return self.ids[stage]
        tags = {
            "mlflow.source.name": "vantage",
            "mlflow.source.type": "LOCAL",
            **own_tags(self._opening, stage),
        }
        if stage is not None:
            tags["mlflow.parentRunId"] = self.run_of(None, time)
        name = self._opening.run_id if stage is None else stage
        run = self._client.create_run(self._experiment_id, start_time=time, tags=tags, run_name=name)
        self._ids = {**self.ids, stage: run.info.run_id}
        return str(run.info.run_id)


def search(client: MlflowClient, experiments: Sequence[str], tag: str, value: str) -> Iterator[entities.Run]:
    """Yield every run with the tag, the earliest first."""
    token = None
    while True:
        runs = client.search_runs(
            list(experiments),
            filter_string=f"tags.`{tag}` = '{value}'",
            max_results=500,
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        yield from runs
        token = runs.token
        if not token:
            return


def close_running(
    client: MlflowClient,
    experiments: Sequence[str],
    our_run_id: str,
    *,
    skip: str | None = None,
    reason: str,
    time: int,
) -> None:
    """Set the MLflow runs that a dead process left RUNNING to KILLED, except the MLflow run ``skip``."""
    for run in list(search(client, experiments, "vantage.run_id", our_run_id)):
        if run.info.status == "RUNNING" and run.info.run_id != skip:
            client.set_tag(run.info.run_id, "vantage.interrupted", reason)
            client.set_terminated(run.info.run_id, "KILLED", time)


def page_of(experiment_id: str, run_id: str) -> str:
    """Return a run's page within MLflow's site."""
    return f"#/experiments/{experiment_id}/runs/{run_id}"
