"""Move an alias of a registered model; the newest movement is kept, in whatever order they are sent."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from mlflow.entities.model_registry import RegisteredModel
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from vantage.ledger.alias_moves import AliasMove
from vantage.ledger.operations import MoveAlias
from vantage.ledger.to_mlflow.model_description import PublishingError
from vantage.schemas.records.milliseconds import LATEST

TAG = "vantage.alias."
"""Prefix of the tag on a registered model that holds the newest movement of one alias, as JSON."""


class Movement(NamedTuple):
    """One movement of an alias: the version, the time, the run and the person."""

    version: str
    time: int
    """Milliseconds since 1970; movements are ordered by this time."""
    run_id: str
    """The Vantage run whose ledger contains the movement."""
    by: str
    """Name of the person who moved it; empty: the run moved it at its end."""
    reason: str


NoteMove = Callable[[AliasMove], None]
"""Called with each movement that makes an alias point to another version, before MLflow makes it."""


def move_alias(client: MlflowClient, name: str, alias: str, movement: Movement, note: NoteMove) -> str | None:
    """Move the alias, unless a later movement is known; returns the reason if it was not moved, else None.

    A ledger may send an old operation late, or again; that must not undo later movements.
    """
    model = client.get_registered_model(name)
    known = _newest(model, alias)
    if known is not None and known.time > movement.time:
        who = known.by or f"run {known.run_id}"
        when = datetime.fromtimestamp(known.time / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return (
            f"{who} moved it to version {known.version} after that, at {when}; if that time is wrong, delete the tag {TAG}{alias} "
            f"of the registered model {name} in MLflow, and publish again"
        )
    if (present := str(model.aliases.get(alias, ""))) != movement.version:
        note(
            AliasMove(
                registered_model=name,
                alias=alias,
                from_version=present,
                to_version=movement.version,
                time=movement.time,
                run_id=movement.run_id,
                by=movement.by,
            )
        )
    client.set_registered_model_alias(name, alias, movement.version)
    client.set_registered_model_tag(name, f"{TAG}{alias}", json.dumps(movement._asdict()))
    return None


def apply_movement(
    client: MlflowClient, operation: MoveAlias, *, our_run_id: str, note: NoteMove
) -> str | None:
    """Move an alias to a version that was published before; returns the reason if it was not moved, else None.

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
    movement = Movement(version, operation.order, our_run_id, operation.by, operation.reason)
    return move_alias(client, name, operation.alias, movement, note)


def _newest(model: RegisteredModel, alias: str) -> Movement | None:
    text = model.tags.get(f"{TAG}{alias}")
    try:
        known = None if text is None else Movement(**json.loads(text))
    except (ValueError, TypeError, RecursionError):  # somebody wrote the tag by hand
        return None
    return known if known is not None and isinstance(known.time, int) and 0 <= known.time <= LATEST else None
