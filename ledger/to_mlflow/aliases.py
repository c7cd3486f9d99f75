"""Movements of an alias of a registered model; the newest is kept, whatever order they are sent in."""

import json
from typing import NamedTuple

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from vantage.ledger.operations import MoveAlias
from vantage.ledger.to_mlflow.model_description import PublishingError

TAG = "vantage.alias."
"""Begins the tag of a registered model with the newest movement of one alias, as JSON."""


class Movement(NamedTuple):
    """Who moved an alias where, and when."""

    version: str
    time: int
    """Milliseconds since 1970."""
    run_id: str
    """Our run whose ledger has it."""
    by: str
    """Who moved it; empty: the run at its end."""
    reason: str


def move_alias(client: MlflowClient, name: str, alias: str, movement: Movement) -> str | None:
    """Move the alias, unless a later movement is known; returns why it stays, or None.

    A ledger may send an old operation late, or again; that must not undo what came after it.
    """
    known = _newest(client, name, alias)
    if known is not None and known.time > movement.time:
        who = known.by or f"run {known.run_id}"
        return f"{who} moved it to version {known.version} after that"
    client.set_registered_model_alias(name, alias, movement.version)
    client.set_registered_model_tag(name, f"{TAG}{alias}", json.dumps(movement._asdict()))
    return None


def apply_movement(client: MlflowClient, operation: MoveAlias, *, our_run_id: str) -> str | None:
    """Move an alias to a version that was published before; returns why it stays, or None.

    Raises:
        PublishingError: there is no such version, or it holds another artifact.
    """
    name, version = operation.registered_model, operation.to_version
    try:
        found = client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise PublishingError(f"MLflow has no version {version} of {name} any longer") from None
    if found.tags.get("vantage.digest") != operation.digest:
        raise PublishingError(f"version {version} of {name} is not {operation.digest[:12]} any longer")
    movement = Movement(version, operation.time, our_run_id, operation.by, operation.reason)
    return move_alias(client, name, operation.alias, movement)


def _newest(client: MlflowClient, name: str, alias: str) -> Movement | None:
    text = client.get_registered_model(name).tags.get(f"{TAG}{alias}")
    try:
        known = None if text is None else Movement(**json.loads(text))
    except (ValueError, TypeError, RecursionError):  # written by hand
        return None
    return known if known is not None and isinstance(known.time, int) else None
