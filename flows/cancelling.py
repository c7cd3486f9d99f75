"""Stop a run from outside: the process that executes it, and its attempts on pools if that process has died."""

import json

from vantage.runs.record import RunRecord
from vantage.runs.run import is_active
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import AttemptOutcome
from vantage.schemas.steps import pool_of
from vantage.storage.messages import Messages, newest_messages


def cancel_run(workspace: Workspace, record: RunRecord) -> list[str]:
    """Ask all processes that work for the run to save its state and stop; returns one line for each request."""
    if is_active(workspace, record.run_id):
        workspace.records.request_cancel(record.run_id)
        return [f"run {record.run_id} is asked to stop: running stages save their state"]
    asked = []
    for step, messages in attempts_under_way(workspace, record).items():
        if messages.read("stop") is None:
            messages.write("stop", b"")
            asked.append(f"{step}, whose run has no process any more, is asked to save its state and stop")
        # without a heartbeat, the attempt still waits for a worker; a worker that takes it now finds the request
        if messages.read("beat") is None:
            messages.create("outcome.json", AttemptOutcome(status="stopped").model_dump_json().encode())
    return asked


def attempts_under_way(workspace: Workspace, record: RunRecord) -> dict[str, Messages]:
    """Return step → its attempt on a pool that has no outcome yet, even if it still waits for a worker.

    An attempt that another run asked for is left to that run, if its process lives.
    """
    found = {}
    for step, stage_key in record.used_keys.items():
        if pool_of(record.recipe, step) is None:
            continue
        messages = newest_messages(workspace.storage.remote, stage_key)
        if messages is None or messages.read("outcome.json") is not None:
            continue
        asked_by = _asked_by(messages) or record.run_id
        if asked_by == record.run_id or not is_active(workspace, asked_by):
            found[step] = messages
    return found


def _asked_by(messages: Messages) -> str | None:
    """Return the run that asked for an attempt; None: its request is gone, or cannot be read."""
    try:
        request = json.loads(messages.read("request.json") or b"{}")
        return str(request["run_id"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
