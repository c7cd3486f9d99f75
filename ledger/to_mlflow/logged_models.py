"""Record artifacts as logged models in MLflow, with their parents; the files stay in our store."""

import re

from mlflow import entities
from mlflow.tracking import MlflowClient

from vantage.ledger.expected.artifact_fields import ExpectedModel
from vantage.ledger.expected.texts import fit_tag
from vantage.ledger.to_mlflow.writing import NOTE

EXTERNAL = "mlflow.model.isExternal"
"""Tag of a model whose files are elsewhere."""


def record_model(
    client: MlflowClient, expected: ExpectedModel, *, experiment_id: str, run_id: str, note: str
) -> str:
    """Find or create the logged model, as an output of MLflow's run ``run_id``; returns its id."""
    digest = expected.tags["vantage.digest"]
    found = client.search_logged_models(
        [experiment_id],
        filter_string=f"source_run_id = '{run_id}' AND tags.`vantage.digest` = '{digest}'",
    )
    if found:  # made before the process was killed, or a stage was extended and kept its weights
        model = found[0]
        client.set_logged_model_tags(model.model_id, {**expected.tags, NOTE: fit_tag(note)})
        outputs = client.get_run(run_id).outputs
        is_output = outputs is not None and model.model_id in {
            each.model_id for each in outputs.model_outputs
        }
    else:
        is_output = False
        tags = {
            **expected.tags,
            NOTE: fit_tag(note),
            EXTERNAL: "true",
        }
        model = client.create_logged_model(
            experiment_id,
            name=expected.name,
            source_run_id=run_id,
            tags=tags,
            params=dict(expected.params),
            model_type=expected.kind,
        )
    client.finalize_logged_model(model.model_id, "READY")
    if not is_output:
        client.log_outputs(run_id, [entities.LoggedModelOutput(model.model_id, step=0)])
    return str(model.model_id)


def model_in(location: str) -> str | None:
    """Return the id in the address of a logged model's files; each run that made an equal artifact has its own."""
    found = re.search(r"/(m-[0-9a-f]{32})/", location)
    return found[1] if found else None
