"""Read the status of runs, also while another process executes them."""

from dataclasses import dataclass, field
from typing import Any

from vantage.attempts.jobs import gates_of
from vantage.runs.contradictions import contradictions
from vantage.runs.damage import damage_of
from vantage.runs.record import RunRecord
from vantage.runs.run import is_active, read_run
from vantage.runs.workspace import Workspace
from vantage.tasks.training.progress import StageProgress, read_progress
from vantage.tasks.training.scratch import PROGRESS


@dataclass(frozen=True)
class RunState:
    """The current state of a run."""

    record: RunRecord
    interrupted: bool
    """Whether its status is ``running`` although no process executes it; the same command resumes it."""
    progress: dict[str, StageProgress]
    """Running stage → its progress."""
    contradictions: tuple[str, ...] = ()
    """Differences between the run's record and its artifacts."""
    damage: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Step or registered model → problems of its artifact, or of MLflow's copy."""
    computed_by: dict[str, str] = field(default_factory=dict)
    """Step that this run waits for → who computes it: another run, its process and machine."""

    @property
    def status(self) -> str:
        return "interrupted" if self.interrupted else self.record.status

    def status_of(self, step: str) -> str:
        """Return the stage's status; a stage of an interrupted run is not running."""
        status = self.record.stages[step].status
        return "interrupted" if self.interrupted and status == "running" else status

    def as_json(self) -> dict[str, Any]:
        """Return the run in the output of ``status --json``."""
        kept = {
            "attempt", "stage_key", "digest", "metrics", "left_out", "warnings", "verdicts", "remark", "seconds", "reason",
            "provenance", "shorter",
        }  # fmt: skip
        stages = {}
        for step, stage in self.record.stages.items():
            progress = self.progress.get(step)
            stages[step] = {
                "status": self.status_of(step),
                **stage.model_dump(mode="json", include=kept),
                "gates": [gate.model_dump(mode="json") for gate in gates_of(self.record.recipe, step)],
                "progress": progress.model_dump(mode="json") if progress else None,
                "computed_by": self.computed_by.get(step),
            }
        included = {"run_id", "recipe_digest", "source", "started", "mlflow_run_id", "prefect_flow_run_ids"}
        return {
            **self.record.model_dump(mode="json", include=included),
            "status": self.status,
            "stages": stages,
            "open_questions": {
                subject: question.model_dump(mode="json")
                for subject, question in self.record.open_questions.items()
            },
            "approvals": [answer.model_dump(mode="json") for answer in self.record.approvals],
            "contradictions": list(self.contradictions),
            "damage": self.damage,
        }


def run_state(workspace: Workspace, record: RunRecord, *, verify: bool = False) -> RunState:
    """Return the current state of a run: its record, the progress of running stages, and damage.

    ``verify``: read every byte of the run's artifacts (``vantage.runs.damage``).
    """
    progress = {}
    for step, stage in record.stages.items():
        if stage.status == "running" and stage.stage_key is not None:
            report = read_progress(workspace.storage.reports(stage.stage_key, (PROGRESS,)) / PROGRESS)
            if report is not None:
                progress[step] = report
    interrupted = record.status == "running" and not is_active(workspace, record.run_id)
    if interrupted:  # the run may have ended since its record was read
        record = read_run(workspace, record.run_id)
        interrupted = record.status == "running"
    return RunState(
        record,
        interrupted,
        progress,
        tuple(contradictions(workspace, record)),
        damage_of(workspace, record, verify=verify),
        {} if interrupted or record.status != "running" else _computed_by(workspace, record),
    )


def _computed_by(workspace: Workspace, record: RunRecord) -> dict[str, str]:
    """Return waiting step → who computes it, for the steps whose key the run has looked up."""
    storage, own = workspace.existing_storage, f"run {record.run_id}"
    waiting = {
        step: key
        for step, key in record.used_keys.items()
        if step in record.stages and record.stages[step].status == "waiting"
    }
    holders = {} if storage is None else {step: storage.holder_of(key) for step, key in waiting.items()}
    return {step: holder for step, holder in holders.items() if holder and not holder.startswith(own)}
