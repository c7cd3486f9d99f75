"""What an attempt asks of the container or process that a worker starts for it, as Prefect's job variables."""

from typing import Any

from vantage.schemas.recipe.stage import Resources

ENVIRONMENT = {
    # A user's own models/ in the worker's folder must not be imported in our place.
    "PYTHONSAFEPATH": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def job_variables(resources: Resources) -> dict[str, Any]:
    """Return job variables of one attempt; pools ignore those that their template has no place for.

    ``gpus``, ``cpus``, ``memory``, ``image`` and ``node_selector`` are those of the templates in ``deploy/pools``.
    """
    asked = {
        "gpus": resources.gpus,
        "cpus": resources.cpus,
        "memory": resources.memory,
        "image": resources.image,
        "node_selector": resources.node_selector or None,
    }
    # A container cannot see which image it was made of, and its attempt records it.
    image = {} if resources.image is None else {"VANTAGE_IMAGE": resources.image}
    return {
        "env": {**ENVIRONMENT, **image},
        **{name: value for name, value in asked.items() if value is not None},
    }
