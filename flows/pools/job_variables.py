"""Prefect job variables of an attempt: its needs from the container or process that a worker starts."""

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
"""Seconds after the grace period in which a pool's container must end, until its checkpoint is in the bucket."""


def job_variables(resources: Resources) -> dict[str, Any]:
    """Return the job variables of one attempt; a pool ignores variables that its template does not use.

    The templates in ``deploy/pools`` use ``gpus``, ``cpus``, ``memory``, ``image``, ``node_selector`` and
    ``seconds_to_save``.
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
    # A container cannot see the name of its image, which the attempt records.
    image = {} if resources.image is None else {"VANTAGE_IMAGE": resources.image}
    return {
        "env": {**ENVIRONMENT, **image},
        **{name: value for name, value in asked.items() if value is not None},
    }
