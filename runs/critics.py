"""Read the critics of a run: diagnoses in the artifacts of value stages, and curves of policy stages, also running ones."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vantage.runs.record import REMOVED, RunRecord, StageRecord
from vantage.runs.run import is_active
from vantage.runs.view import Broken, Maker, Missing, RunView
from vantage.runs.watching import journal_entries
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining
from vantage.schemas.records.critic_advice import advice_on_drift, advice_on_pretraining
from vantage.schemas.records.critic_diagnosis import (
    DIAGNOSIS_FILE,
    CriticDiagnosis,
    CriticDrift,
    PretrainedCritic,
    drift_points,
)
from vantage.tasks.training.scratch import REPORTS


class DamagedDiagnosis(OSError):
    """The stored diagnosis of a critic cannot be read, or differs from its artifact's digest."""


@dataclass(frozen=True)
class Critics:
    """The critics of a run: pretrained critics with diagnoses, and the course of critics that policy stages train."""

    run_id: str
    pretrained: tuple[PretrainedCritic, ...]
    drifts: tuple[CriticDrift, ...]
    missing: tuple[str, ...]
    """Stages whose critic could not be read, with the reason, one line each."""

    def as_json(self) -> dict[str, Any]:
        """Return the output of ``vantage critic --json``."""
        return {
            "run_id": self.run_id,
            "pretrained": [
                {
                    **each.model_dump(mode="json"),
                    "advice": [advice.model_dump(mode="json") for advice in advice_on_pretraining(each)],
                }
                for each in self.pretrained
            ],
            "drifts": [
                {
                    **each.model_dump(mode="json"),
                    "advice": [advice.model_dump(mode="json") for advice in advice_on_drift(each)],
                }
                for each in self.drifts
            ],
            "missing": list(self.missing),
        }


def read_critics(workspace: Workspace, record: RunRecord, step: str | None = None) -> Critics:
    """Return the critics of a run, or of one of its stages.

    Raises:
        RunError: the run has no critic, or no facts about one are recorded; the message contains the remedy.
        DamagedDiagnosis: a diagnosis cannot be read.
    """
    stages = {name: stage for name, stage in record.recipe.stages.items() if has_critic(stage)}
    if not stages:
        raise RunError(
            f"run {record.run_id} has no critic: no value_pretraining stage, and no policy_optimization stage whose "
            "algorithm reads one; name a run that has one, or add such a stage to the recipe"
        )
    if step is not None and step not in stages:
        kind = f" ({record.recipe.stages[step].kind})" if step in record.recipe.stages else ""
        raise RunError(
            f"{step}{kind} is no stage of run {record.run_id} with a critic; it has {', '.join(stages)}"
        )
    if record.status == REMOVED:
        raise RunError(f"run {record.run_id} was removed by `vantage gc`; run its recipe again")
    pretrained, drifts, missing = [], [], []
    for name, stage in stages.items():
        if step is None or name == step:
            found = _read_one(workspace, record, name, stage)
            if isinstance(found, PretrainedCritic):
                pretrained.append(found)
            elif isinstance(found, CriticDrift):
                drifts.append(found)
            else:
                missing.append(found)
    if not pretrained and not drifts:
        raise RunError("; ".join(missing))
    return Critics(record.run_id, tuple(pretrained), tuple(drifts), tuple(missing))


def has_critic(stage: Stage) -> bool:
    """Return whether a stage pretrains a critic or learns from one."""
    return isinstance(stage, ValuePretraining) or (
        isinstance(stage, PolicyOptimization) and stage.algorithm.advantage == "gae"
    )


def _read_one(
    workspace: Workspace, record: RunRecord, step: str, stage: Stage
) -> PretrainedCritic | CriticDrift | str:
    if isinstance(stage, ValuePretraining):
        return _pretrained(workspace, record, step)
    assert isinstance(stage, PolicyOptimization)
    return _drift(workspace, record, step, stage)


def _pretrained(workspace: Workspace, record: RunRecord, step: str) -> PretrainedCritic | str:
    """Return the diagnosis of a value stage's critic, or why there is none."""
    done = record.stages.get(step, StageRecord())
    storage = workspace.existing_storage
    if done.digest is None or storage is None:
        return f"{step} is {done.status.replace('_', ' ')}, and its critic is diagnosed at its end: look again then"
    again = "run the same recipe again, which pretrains this critic anew"
    if not storage.has_object(done.digest):
        return f"the store has no artifact of {step} any longer; {again}"
    try:
        data = storage.read_file(done.digest, DIAGNOSIS_FILE)
    except (ValueError, OSError) as error:
        raise DamagedDiagnosis(f"{step}: its artifact is damaged ({error}); {again}") from error
    if data is None:
        return f"{step} was made by a version that did not diagnose critics; {again}"
    try:
        diagnosis = CriticDiagnosis.model_validate_json(data)
    except ValidationError:
        return f"the diagnosis of {step} was written by another version; use that one, or {again}"
    return PretrainedCritic(step=step, diagnosis=diagnosis)


def _drift(
    workspace: Workspace, record: RunRecord, step: str, stage: PolicyOptimization
) -> CriticDrift | str:
    """Return a critic's course in a policy stage, or the reason why it is not known."""
    done = record.stages.get(step, StageRecord())
    if done.stage_key is None:
        return f"{step} is {done.status.replace('_', ' ')} and has no iteration yet"
    is_running = done.status == "running"
    run = RunView.of(workspace, record)
    curves = _curves(run, step)
    if not curves and not is_running and isinstance(maker := run.maker(step), Maker):
        curves = _curves(maker.run, maker.step)
    if done.digest is None:  # the journal has what is not in the ledger yet
        for entry in journal_entries(workspace.storage.reports(done.stage_key, REPORTS)):
            curves.setdefault(entry.step, {}).update(entry.metrics)
    points = drift_points(curves)
    if not points and done.digest is not None:
        return (
            f"the curves of {step} are not in this workspace any longer (its run was removed by `vantage gc`); look for them "
            "in MLflow"
        )
    return CriticDrift(
        step=step,
        points=points,
        is_switched=stage.algorithm.weighs_critic,
        is_running=is_running and is_active(workspace, record.run_id),
    )


def _curves(run: RunView, step: str) -> dict[int, dict[str, float]]:
    """Return iteration → metric → value of a step, from the run's outbox. Raises DamagedDiagnosis if it cannot be read."""
    history = run.history
    if isinstance(history, Broken):
        raise DamagedDiagnosis(f"{history}; look for the curves of {step} in MLflow")
    curves: dict[int, dict[str, float]] = {}
    measured = {} if isinstance(history, Missing) else history.curves.get(step, {})
    for name, rows in measured.items():
        for iteration, _, value in rows:
            curves.setdefault(iteration, {})[name] = value
    return curves
