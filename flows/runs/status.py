"""How far runs are, seen from outside: from any terminal, while another process drives them."""

from dataclasses import dataclass, field
from typing import Any

from flows.attempts.jobs import gates_of
from flows.runs.damage import damage_of
from flows.runs.evidence import contradictions
from flows.runs.run import RunRecord, Workspace, is_driven
from tasks.training.progress import StageProgress, read_progress
from tasks.training.scratch import PROGRESS


@dataclass(frozen=True)
class RunView:
    """A run as it stands."""

    record: RunRecord
    interrupted: bool
    """It calls itself running, but no process drives it: the same command goes on with it."""
    progress: dict[str, StageProgress]
    """Running stage → how far it is."""
    contradictions: tuple[str, ...] = ()
    """What the run's own file says otherwise than its artifacts."""
    damage: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Step, or registered model → what is wrong with its artifact, or with MLflow's copy."""

    @property
    def status(self) -> str:
        return "interrupted" if self.interrupted else self.record.status

    def status_of(self, step: str) -> str:
        """The stage's status; a stage of an interrupted run is not running."""
        status = self.record.stages[step].status
        return "interrupted" if self.interrupted and status == "running" else status

    def as_json(self) -> dict[str, Any]:
        """What ``status --json`` prints of the run."""
        kept = {
            "attempt", "stage_key", "digest", "metrics", "left_out", "warnings", "verdicts", "remark", "seconds", "reason",
        }  # fmt: skip
        stages = {}
        for step, stage in self.record.stages.items():
            progress = self.progress.get(step)
            stages[step] = {
                "status": self.status_of(step),
                **stage.model_dump(mode="json", include=kept),
                "gates": [gate.model_dump(mode="json") for gate in gates_of(self.record.recipe, step)],
                "progress": progress.model_dump(mode="json") if progress else None,
            }
        told = {"run_id", "recipe_digest", "source", "started", "mlflow_run_id", "prefect_flow_run_ids"}
        return {
            **self.record.model_dump(mode="json", include=told),
            "status": self.status,
            "stages": stages,
            "contradictions": list(self.contradictions),
            "damage": self.damage,
        }


def look(workspace: Workspace, record: RunRecord, *, verify: bool = False) -> RunView:
    """The run with what its files say of its running stages, and what is damaged of what it made.

    ``verify`` reads every byte of what is stored (``flows.runs.damage``).
    """
    progress = {}
    for step, stage in record.stages.items():
        if stage.status == "running" and stage.stage_key is not None:
            report = read_progress(workspace.store / "scratch" / stage.stage_key / PROGRESS)
            if report is not None:
                progress[step] = report
    interrupted = record.status == "running" and not is_driven(workspace, record.run_id)
    return RunView(
        record,
        interrupted,
        progress,
        tuple(contradictions(workspace, record)),
        damage_of(workspace, record, verify=verify),
    )
