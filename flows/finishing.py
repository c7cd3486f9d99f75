"""Ask a training stage to end with its present result, wherever it is computed."""

from vantage.runs.record import UNFINISHED, RunRecord
from vantage.runs.run import is_active
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.problems import suggest
from vantage.schemas.recipe.stage import Training
from vantage.schemas.steps import pool_of
from vantage.storage.messages import newest_messages
from vantage.tasks.training.watched import ask_to_finish

MAX_REASON = 500
"""Most characters of a reason, which becomes a part of the artifact."""


def finish_stage(workspace: Workspace, record: RunRecord, step: str, *, reason: str) -> str:
    """Ask the stage to end as if its recipe asked for no further step; returns a sentence about the request.

    Raises:
        RunError: the run has no such stage, or the stage trains nothing or is not under way.
    """
    if len(reason) > MAX_REASON:
        raise RunError(f"--reason has {len(reason)} characters, and may have {MAX_REASON}; shorten it")
    stage = record.recipe.stages.get(step)
    if stage is None:
        raise RunError(f"run {record.run_id} has no stage {step!r}; {suggest(step, record.recipe.stages)}")
    if not isinstance(stage, Training):
        raise RunError(
            f"stage {step} has kind {stage.kind}, which has no steps to leave out; cancel the run instead"
        )
    known, key = record.stages.get(step), record.used_keys.get(step)
    if (
        record.status not in UNFINISHED
        or key is None
        or known is None
        or known.status not in ("running", "resumable")
    ):
        state = "has not begun" if known is None else f"is {known.status}"
        raise RunError(
            f"{step} of run {record.run_id} {state}, so there is nothing to finish; name a stage that trains"
        )
    if pool_of(record.recipe, step) is not None:
        messages = newest_messages(workspace.storage.remote, key)
        if messages is None or messages.read("outcome.json") is not None:
            raise RunError(f"no worker computes {step} of run {record.run_id} now; ask again when one does")
        messages.write("finish", reason.encode())
    elif not workspace.storage.has_scratch(key):
        raise RunError(
            f"{step} of run {record.run_id} is not computed on this machine; run the command where it is"
        )
    else:
        ask_to_finish(workspace.storage.scratch_folder(key), run_id=record.run_id, reason=reason)
    goes_on = known.status == "running" and is_active(workspace, record.run_id)
    when = "after its next step" if goes_on else "after one more step, when the run is resumed"
    return f"{step} of run {record.run_id} is asked to finish: it ends {when}, and its artifact is marked"
