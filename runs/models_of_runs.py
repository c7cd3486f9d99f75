"""Find a model that a step of another run has made, pin it when a run begins, and fetch its files when they are read."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vantage.models.model_width import UnknownWidth, hidden_size, width_in_config
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.run_ids import LATEST, NoSuchRun, SeveralRuns, find_run, run_ids
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.inputs import SourcedModel
from vantage.schemas.recipe.sources import StageOfRun
from vantage.schemas.recipe.work import Work, copied_stage
from vantage.schemas.records.artifacts import Artifact, StoredModel
from vantage.schemas.steps import dependencies, merging_step
from vantage.storage.measured_file import METRICS_FILE
from vantage.storage.sealed_folders import MANIFEST
from vantage.storage.storage import Storage

_POLICY, _REWARD_MODEL = "policy", "reward_model"
_KINDS = {_POLICY: "a policy", _REWARD_MODEL: "a reward model", "value_model": "a critic"}
_CLOSED = {"gate_closed": "its gate is closed", "waiting_approval": "it waits for approval"}
"""Status of a stage with an artifact → warning for those who read the artifact."""


def pin_stage(
    field: str, origin: StageOfRun, workspace: Workspace, *, is_reward_model: bool = False
) -> StageOfRun:
    """Return the step with its run's id and the content digest of its model; nothing is written.

    ``latest`` is the newest run whose recipe has such a step.

    Args:
        field: the field of the recipe that names the step, for messages.
        origin: the run and the step.
        workspace: the workspace of the runs.
        is_reward_model: whether the recipe's rewards read the model as a reward model; otherwise it must be a policy.

    Raises:
        RunError: there is no such run or step, or the step has made nothing yet, or no model that a recipe can import.
    """
    wanted = _REWARD_MODEL if is_reward_model else _POLICY
    shown = f"{field}={str(origin)!r}"
    record = _run_named(shown, origin, workspace)
    if origin.step not in dependencies(record.recipe):
        made = ", ".join(_made(wanted, record, workspace)) or f"none that has made {_KINDS[wanted]}"
        raise RunError(f"{shown}: run {record.run_id} has no step {origin.step}; it has {made}")
    artifact = _artifact(record, origin.step, workspace)
    if artifact is None:
        raise RunError(f"{shown}: {_why_unmade(record, origin, workspace)}")
    what = f"{origin.step} of run {record.run_id}"
    if artifact.kind != wanted:
        made = ", ".join(_made(wanted, record, workspace)) or "a stage of another run"
        is_what = _KINDS.get(artifact.kind, f"no model ({artifact.kind})")
        why = ", since a reward scores with it" if is_reward_model else ""
        raise RunError(f"{shown}: {what} is {is_what}, and {field} takes {_KINDS[wanted]}{why}; name {made}")
    if isinstance(artifact, StoredModel) and artifact.base is not None:
        merged = merging_step(origin.step)
        place = f"run:{record.run_id}/"
        remedy = (
            f"write {place}{merged}"
            if _artifact(record, merged, workspace) is not None
            else f"name the folder that `vantage export {record.run_id}/{origin.step} FOLDER` writes"
        )
        raise RunError(f"{shown}: {what} is adapters without the model beneath them; {remedy}")
    return StageOfRun(record.run_id, origin.step, artifact.digest)


def fetch_stage(origin: StageOfRun, workspace: Workspace, target: Path) -> None:
    """Write the pinned model's files to ``target``, each byte compared with the pinned digest.

    Raises:
        RunError: the store no longer has the files, or they are damaged.
    """
    record = workspace.records.read(origin.run)
    artifact = _artifact(record, origin.step, workspace)
    what = f"{origin.step} of run {record.run_id}"
    if artifact is None or artifact.digest != origin.digest:
        found = "nothing" if artifact is None else artifact.digest[:12]
        raise RunError(
            f"{what} was {str(origin.digest)[:12]} when this run began, and the store has {found} now; run that recipe "
            "again, or start a new run"
        )
    problems = workspace.storage.verify(artifact)
    if problems:
        raise RunError(f"{what} is damaged: {'; '.join(problems)}; run its recipe again, which makes it anew")
    shutil.rmtree(target, ignore_errors=True)  # left by an attempt that was interrupted
    # the import has a manifest and metrics of its own
    left_out = shutil.ignore_patterns(MANIFEST, METRICS_FILE)
    shutil.copytree(workspace.storage.folder(artifact), target, ignore=left_out)


def model_width(model: SourcedModel, workspace: Workspace | None) -> int:
    """Return the hidden size of a model; another run may have made the model.

    Raises:
        UnknownWidth: it cannot be found.
        ValueError: there is no such source (RunError: no such run), or it is no policy.
    """
    origin = model.origin
    if not isinstance(origin, StageOfRun) or workspace is None:
        return hidden_size(model.whole)
    field = "model.source"
    record = _run_named(f"{field}={str(origin)!r}", origin, workspace)
    if (
        _artifact(record, origin.step, workspace) is None
    ):  # the stage is not made yet; it will have the width of the model that its run begins with
        return model_width(record.recipe.model, workspace)
    digest = str(pin_stage(field, origin, workspace).digest)
    try:
        config = json.loads(workspace.storage.read_file(digest, "config.json") or b"")
    except (OSError, ValueError) as error:
        raise UnknownWidth(f"config.json of {origin.named} cannot be read ({error})") from error
    return width_in_config(config, f"config.json of {origin.named}")


def model_before(field: str, origin: StageOfRun, workspace: Workspace) -> SourcedModel | None:
    """Return the model that the run begins with, if the step has made nothing yet, or its files are gone; None: it is made.

    Raises:
        RunError: there is no such run or step.
    """
    shown = f"{field}={str(origin)!r}"
    record = _run_named(shown, origin, workspace)
    if origin.step not in dependencies(record.recipe):
        pin_stage(field, origin, workspace)  # this refuses it, and lists the existing steps
    return record.recipe.model if _artifact(record, origin.step, workspace) is None else None


def stage_behind(work: Work, store: Storage | None, runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield the stage that an import of a pinned recipe copies, and warnings for those who read the model."""
    origin = copied_stage(work)
    if origin is None:
        return
    record = next((run for run in runs if run.run_id == origin.run), None)
    stage = None if record is None else record.stages.get(origin.step)
    yield f"{origin.step} of run {origin.run}"
    if stage is None or store is None or stage.stage_key is None:
        return
    ref = store.find(stage.stage_key)
    if ref is not None and ref.artifact.ended_early is not None:
        yield f"which {ref.artifact.ended_early}"
    if stage.status in _CLOSED:
        yield f"which is marked: {_CLOSED[stage.status]}"


def _run_named(shown: str, origin: StageOfRun, workspace: Workspace) -> RunRecord:
    """Return the run's record; ``latest`` is the newest run whose recipe has the step.

    Raises:
        RunError: there is no such run, or there are several; the message begins with ``shown``.
    """
    if origin.run == LATEST and (record := next(_runs_with(origin.step, workspace), None)) is not None:
        return record
    try:
        return workspace.records.read(find_run(workspace, origin.run))
    except (NoSuchRun, SeveralRuns) as error:
        raise RunError(f"{shown}: {error}") from None


def _runs_with(step: str, workspace: Workspace) -> Iterator[RunRecord]:
    """Yield the runs whose recipe has the step, the newest first; those that ``vantage gc`` has removed are left out."""
    for run_id in reversed(run_ids(workspace)):
        record = workspace.records.read(run_id)
        if record.status != REMOVED and step in dependencies(record.recipe):
            yield record


def _artifact(record: RunRecord, step: str, workspace: Workspace) -> Artifact | None:
    """Return the artifact of a step, if the store still has it."""
    stage, storage = record.stages.get(step), workspace.existing_storage
    if stage is None or stage.stage_key is None or stage.digest is None or storage is None:
        return None
    try:
        ref = storage.find(stage.stage_key)
    except ValueError as error:
        raise RunError(f"{step} of run {record.run_id} is damaged ({error}); run its recipe again") from error
    return ref.artifact if ref is not None and ref.artifact.digest == stage.digest else None


def _made(kind: str, record: RunRecord, workspace: Workspace) -> list[str]:
    """Return the steps that have made a whole model of a kind, as a recipe names them."""
    return [
        f"{record.run_id}/{step}"
        for step in dependencies(record.recipe)
        if (artifact := _artifact(record, step, workspace)) is not None
        and artifact.kind == kind
        and not (isinstance(artifact, StoredModel) and artifact.base)
    ]


def _why_unmade(record: RunRecord, origin: StageOfRun, workspace: Workspace) -> str:
    what = f"{origin.step} of run {record.run_id}"
    stage = record.stages.get(origin.step)
    if record.status == REMOVED or (stage is not None and stage.digest is not None):
        return f"the store has no model of {what} any longer; run its recipe again"
    status = "waiting" if stage is None else stage.status.replace("_", " ")
    earlier = next(
        (
            run.run_id
            for run in _runs_with(origin.step, workspace)
            if origin.run == LATEST and _artifact(run, origin.step, workspace) is not None
        ),
        None,
    )
    remedy = f"write {replace(origin, run=earlier).named}, which is made, or " if earlier else ""
    return f"{what} is {status} and has made no model yet; {remedy}let `vantage resume {record.run_id}` end first"
