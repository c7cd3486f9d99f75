"""The list of a recipe's runs in MLflow: which columns it shows, and its address.

MLflow keeps a shared view of a list in a tag of the experiment, and an address names the tag. MLflow's pages stay the
same for anybody who opens the list without this address.
"""

import json
from collections.abc import Sequence

from mlflow import entities
from mlflow.tracking import MlflowClient

VIEW = "vantage"
"""Key of the shared view."""
_TAG = f"mlflow.sharedViewState.{VIEW}"
_TAGS = ("vantage.conclusion", "vantage.published")
_LONGEST = 5000
"""Most characters of an experiment's tag."""


def page_of_runs(experiment_id: str) -> str:
    """Return the address of the experiment's list of runs within MLflow's site."""
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&workflowType=machine_learning"


def write_view(client: MlflowClient, experiment: entities.Experiment, metrics: Sequence[str]) -> None:
    """Make the list show the recipe's runs without stages: verdict, publications, headline metrics, time and user."""
    view = view_of(metrics)
    if len(view) <= _LONGEST and experiment.tags.get(_TAG) != view:
        client.set_experiment_tag(experiment.experiment_id, _TAG, view)


def view_of(metrics: Sequence[str]) -> str:
    """Return the view as MLflow's page reads it."""
    columns = [
        *(f"tags.`{tag}`" for tag in _TAGS),
        *(f"metrics.`{metric}`" for metric in metrics),
        "attributes.`Description`",
    ]
    return json.dumps({"searchFilter": "tags.`vantage.recipe` != ''", "selectedColumns": columns})
