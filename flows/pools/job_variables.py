"""Prefect job variables of an attempt: what it asks of the container or process that a worker starts."""

import math
from typing import Any

from vantage.schemas.recipe.stage import GRACE_SECONDS, Resources

ENVIRONMENT = {
    # A user's own models/ in the worker's folder must not be imported instead of ours.
    "PYTHONSAFEPATH": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


SECONDS_TO_SEND = 580
"""Seconds that a container of a pool has to end in addition to the grace period: until its checkpoint is in the bucket."""


def job_variables(resources: Resources) -> dict[str, Any]:
    """Return the job variables of one attempt; a pool ignores those that its template does not use.

    ``gpus``, ``cpus``, ``memory``, ``image``, ``node_selector`` and ``seconds_to_save`` are those of the templates in ``deploy/pools``.
    """
    asked = {
        "gpus": resources.gpus,
        "cpus": resources.cpus,
        "memory": resources.memory,
        "image": resources.image,
        "node_selector": resources.node_selector or None,
        "seconds_to_save": None
        if resources.grace_seconds == GRACE_SECONDS
        else SECONDS_TO_SEND + math.ceil(resources.grace_seconds),
    }
    # A container cannot see its own image's name, and its attempt records it.
    image = {} if resources.image is None else {"VANTAGE_IMAGE": resources.image}
    return {
        "env": {**ENVIRONMENT, **image},
        **{name: value for name, value in asked.items() if value is not None},
    }
