"""What the stages of a run have printed, wherever they were computed."""

from flows.runs.record import RunRecord
from flows.runs.workspace import Workspace
from schemas.steps import pool_of
from storage.messages import newest_messages


def read_log(workspace: Workspace, record: RunRecord, step: str) -> bytes:
    """All that the newest attempt at a step has printed so far; empty if nothing."""
    stage = record.stages.get(step)
    if stage is not None and stage.stage_key is not None and pool_of(record.recipe, step) is not None:
        messages = newest_messages(workspace.storage.remote, stage.stage_key)
        if messages is not None and (log := messages.read("log.txt")) is not None:
            return log
    return workspace.records.read_log(record.run_id, step) or b""
