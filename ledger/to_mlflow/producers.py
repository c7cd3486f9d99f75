"""Lineage in MLflow: the runs that made a stage's inputs, and its dataset and model inputs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mlflow import entities
from mlflow.tracking import MlflowClient

from vantage.ledger.entries import RunEntry
from vantage.ledger.expected.artifact_fields import ExpectedDataset
from vantage.ledger.operations import Input
from vantage.ledger.page_links import ArtifactKey, Link, artifact_key
from vantage.ledger.to_mlflow.mlflow_runs import page_of, search
from vantage.ledger.to_mlflow.server import Server
from vantage.schemas.records.artifacts import Artifact


class Producer(NamedTuple):
    """MLflow's run of the stage that made an artifact."""

    experiment_id: str
    mlflow_run_id: str
    stage: str | None
    """Name of the run; None, like ``run_id``, in a run whose tags were removed by hand."""
    run_id: str | None
    """Id of the Vantage run."""
    model_id: str | None
    """The artifact's logged model, if it has one."""


class Producers:
    """The producers of artifacts, on the whole server; results are cached until ``forget``."""

    def __init__(self, server: Server, *, run_id: str) -> None:
        self._server = server
        self._run_id = run_id
        self._experiments: list[str] = []
        self._found: dict[ArtifactKey, Producer] = {}

    def forget(self) -> None:
        """Clear the cache."""
        self._experiments = []
        self._found.clear()

    def remember(self, artifact: Artifact, producer: Producer) -> None:
        """Remember that this run has made the artifact."""
        self._found[artifact_key(artifact)] = producer

    def find(self, artifact: Artifact) -> Producer | None:
        """Return this run if it made the artifact under its stage key, else the earliest run that did; None: none did.

        The digest alone is not enough: two stages may make equal artifacts, for example a policy that learned nothing
        and the model that it started from.
        """
        name = artifact_key(artifact)
        if name not in self._found:
            self._experiments = self._experiments or self._server.experiment_ids()
            producers = [
                run
                for run in search(self._server.client, self._experiments, "vantage.digest", artifact.digest)
                if "vantage.reused_from" not in run.data.tags
                and run.data.tags.get("vantage.stage_key") == artifact.stage_key
            ]
            if not producers:
                return None
            ours = (run for run in producers if run.data.tags.get("vantage.run_id") == self._run_id)
            run = next(ours, producers[0])
            self._found[name] = _producer(run)
        return self._found[name]

    def links(self, entry: RunEntry, *, besides: Artifact | None = None) -> dict[ArtifactKey, Link]:
        """Return artifact → link to its producer, for every artifact of the run ``besides`` one that is being recorded."""
        artifacts = [given.artifact for stage in entry.stages.values() for given in stage.inputs.values()]
        artifacts += [stage.artifact for stage in entry.stages.values() if stage.artifact]
        return {
            artifact_key(artifact): link_to(producer)
            for artifact in artifacts
            if artifact != besides and (producer := self.find(artifact))
        }


def link_to(producer: Producer) -> Link:
    """Return the pages of the producer within MLflow's site."""
    model_page = f"#/experiments/{producer.experiment_id}/models/{producer.model_id}"
    return Link(
        run=page_of(producer.experiment_id, producer.mlflow_run_id),
        run_name=f"{producer.stage} of run {producer.run_id}",
        model=model_page if producer.model_id else None,
    )


def _producer(run: entities.Run) -> Producer:
    tags = run.data.tags
    return Producer(
        experiment_id=run.info.experiment_id,
        mlflow_run_id=run.info.run_id,
        stage=tags.get("vantage.stage"),
        run_id=tags.get("vantage.run_id"),
        model_id=tags.get("vantage.model"),
    )


def log_inputs(
    client: MlflowClient,
    run_id: str,
    inputs: Mapping[str, Input],
    datasets: Sequence[ExpectedDataset],
    producers: Producers,
) -> dict[str, str]:
    """Log the datasets and models that a stage reads; returns tags that name the runs which made its inputs."""
    tags, models = {}, []
    for role, given in inputs.items():
        producer = producers.find(given.artifact)
        if producer is not None:
            tags[f"vantage.parent.{role}.run"] = producer.mlflow_run_id
            if producer.model_id is not None:
                models.append(entities.LoggedModelInput(producer.model_id))
    if datasets or models:
        client.log_inputs(run_id, [_dataset_input(each) for each in datasets], models)
    return tags


def _dataset_input(expected: ExpectedDataset) -> entities.DatasetInput:
    return entities.DatasetInput(
        entities.Dataset(source_type="vantage", **expected.fields),
        [entities.InputTag(name, value) for name, value in expected.tags.items()],
    )
