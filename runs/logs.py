"""Read the output of a run's stages, wherever they were computed."""

from vantage.runs.record import RunRecord
from vantage.runs.workspace import Workspace
from vantage.schemas.steps import pool_of
from vantage.storage.messages import logs_with, messages_of, newest_number


def read_log(workspace: Workspace, record: RunRecord, step: str) -> bytes:
    """Return the output of all attempts at a step so far, the newest last; empty if there is none."""
    stage = record.stages.get(step)
    if stage is not None and stage.stage_key is not None and pool_of(record.recipe, step) is not None:
        remote = workspace.storage.remote
        logs = b""
        for number in range(1, newest_number(remote, stage.stage_key) + 1):
            if (log := messages_of(remote, stage.stage_key, number).read("log.txt")) is not None:
                logs = logs_with(logs, number, log)
        if logs:
            return logs
    return workspace.records.read_log(record.run_id, step) or b""
