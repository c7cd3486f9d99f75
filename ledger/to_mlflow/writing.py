"""Write params, tags and metrics of a run; texts are truncated to MLflow's limits."""

from collections.abc import Iterable, Mapping

from mlflow import entities
from mlflow.tracking import MlflowClient

from vantage.ledger.expected.texts import fit_param, fit_tag

NOTE = "mlflow.note.content"
"""Tag that MLflow shows as the text of a page."""


def write(
    client: MlflowClient,
    run_id: str,
    *,
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    metrics: Iterable[entities.Metric] = (),
) -> None:
    """Write any number of params, tags and metrics; texts that are too long are truncated."""
    client.log_batch(  # it splits the batch by MLflow's limits, and sends no empty request
        run_id,
        metrics=list(metrics),
        params=[entities.Param(name, fit_param(value)) for name, value in (params or {}).items()],
        tags=[entities.RunTag(name, fit_tag(value)) for name, value in (tags or {}).items()],
    )
