"""Announce to Prefect that an alias has moved, by an event that starts deployments (``vantage deploy --on``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, cast

from vantage.flows.prefect_server.server import configured_url
from vantage.ledger.alias_moves import FILE, AliasMove, AliasMoves
from vantage.ledger.outbox import Outbox
from vantage.ledger.tracking import without_password
from vantage.runs.watching import Watcher
from vantage.runs.workspace import Workspace
from vantage.schemas.safe_text import safe_text

MOVED = "vantage.alias.moved"
"""Name of the event."""
MOVE_ID = "vantage.move"
"""Label of the event's resource with the movement's id, by which a repeated event is recognised."""


def alias_resource(target: str) -> str:
    """Return the id of an alias (``NAME@ALIAS``) among Prefect's resources."""
    return f"vantage.alias.{target}"


@contextmanager
def moves_announced(workspace: Workspace, watcher: Watcher) -> Iterator[None]:
    """Announce, after this block, the movements of aliases that MLflow has received and Prefect has not."""
    try:
        yield
    finally:
        announce_moves(workspace, watcher)


def announce_moves(workspace: Workspace, watcher: Watcher) -> None:
    """Send an event for each movement of an alias by the workspace's runs that was not announced yet.

    Without a configured server nobody waits for the event, so the movement counts as announced. A server that does not
    answer gets the event at the end of the next run. The event has the movement's id, so sending it twice starts one
    run.
    """
    waiting = []
    for file in sorted((workspace.root / "runs").glob(f"*/ledger/{FILE}")):
        # if records are unsent, MLflow may not have moved the alias yet
        if not Outbox(file.parent).is_unsent():
            moves = AliasMoves(file.parent)
            waiting += [(moves, move) for move in moves.waiting()]
    if not waiting:
        return
    url = configured_url()
    try:
        if url is not None:
            _send([_event(move) for _, move in waiting])
    except Exception as error:  # the aliases have moved, even if Prefect fails
        names = ", ".join(dict.fromkeys(move.target for _, move in waiting))
        watcher.say(
            f"  Prefect ({without_password(str(url))}) was not informed that {names} moved: "
            f"{safe_text(str(error) or type(error).__name__)[:300]}; the next run of this workspace informs it",
            "yellow",
        )
        return
    for moves, move in waiting:
        moves.mark_announced(move)


def _event(move: AliasMove) -> dict[str, Any]:
    return {
        "id": str(move.id),
        "event": MOVED,
        "occurred": datetime.fromtimestamp(move.time / 1000, UTC).isoformat(),
        "resource": {
            "prefect.resource.id": alias_resource(move.target),
            "prefect.resource.name": move.target,
            MOVE_ID: str(move.id),
        },
        "payload": move.model_dump(mode="json"),
    }


def _send(events: list[dict[str, Any]]) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        # its type annotation does not list the route of events
        client.request("POST", cast(Any, "/events"), json=events)
