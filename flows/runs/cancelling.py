"""Stops a run from outside: the process that executes it, and attempts whose process that ordered them has died."""

from flows.runs.record import RunRecord
from flows.runs.run import is_active
from flows.runs.workspace import Workspace
from schemas.steps import pool_of
from storage.messages import newest_messages


def cancel_run(workspace: Workspace, record: RunRecord) -> list[str]:
    """Ask everything that works for the run to save its state and stop; returns what was asked, one line each."""
    if is_active(workspace, record.run_id):
        workspace.records.request_cancel(record.run_id)
        return [f"run {record.run_id} is asked to stop: running stages save their state"]
    asked = []
    for step, stage in record.stages.items():
        if stage.stage_key is None or pool_of(record.recipe, step) is None:
            continue
        messages = newest_messages(workspace.storage.remote, stage.stage_key)
        if messages is not None and messages.read("outcome.json") is None and messages.read("stop") is None:
            messages.write("stop", b"")
            asked.append(f"{step}, whose run has no process any more, is asked to save its state and stop")
    return asked
