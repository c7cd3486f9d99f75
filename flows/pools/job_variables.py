"""Prefect job variables of an attempt: what it asks of the container or process that a worker starts."""

from typing import Any

from vantage.schemas.recipe.stage import Resources

ENVIRONMENT = {
    # A user's own models/ in the worker's folder must not be imported instead of ours.
    "PYTHONSAFEPATH": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def job_variables(resources: Resources) -> dict[str, Any]:
    """Return the job variables of one attempt; a pool ignores those that its template does not use.

    ``gpus``, ``cpus``, ``memory``, ``image`` and ``node_selector`` are those of the templates in ``deploy/pools``.
    """
    asked = {
        "gpus": resources.gpus,
        "cpus": resources.cpus,
        "memory": resources.memory,
        "image": resources.image,
        "node_selector": resources.node_selector or None,
    }
    # A container cannot see its own image's name, and its attempt records it.
    image = {} if resources.image is None else {"VANTAGE_IMAGE": resources.image}
    return {
        "env": {**ENVIRONMENT, **image},
        **{name: value for name, value in asked.items() if value is not None},
    }
