"""A run as its ledger knows it, made from ``run.json`` and the store: for cards of models, where no MLflow is asked."""

from vantage.attempts.jobs import work_of
from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.operations import Input
from vantage.runs.record import RunRecord
from vantage.schemas.recipe.work import ImportModel, PrepareData
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.storage.refs import DamagedRef
from vantage.storage.storage import Storage


def recorded_entry(record: RunRecord, storage: Storage) -> RunEntry:
    """The steps of the run whose artifacts the store still has, with what they read of each other."""
    recipe, read = record.recipe, dependencies(record.recipe)
    artifacts = {
        step: artifact for step in ordered_steps(recipe) if (artifact := _artifact(record, storage, step))
    }
    stages = {}
    for step, artifact in artifacts.items():
        done, work = record.stages[step], work_of(recipe, step)
        source = work.data.source if isinstance(work, PrepareData) else None
        stages[step] = StageEntry(
            name=step,
            kind=work.kind,
            stage_key=artifact.stage_key,
            inputs={
                role: Input(stage=other, artifact=artifacts[other])
                for role, other in read[step].items()
                if other in artifacts
            },
            outcome=done.status,
            artifact=artifact,
            source=work.model.source if isinstance(work, ImportModel) else source,
            source_sha256=done.key_parts.get("inputs", {}).get("source"),
            verdicts=done.verdicts,
        )
    return RunEntry(
        run_id=record.run_id,
        experiment=recipe.recipe,
        name=recipe.recipe,
        stages=stages,
        approvals=tuple(record.approvals),
        generation=recipe.generation.model_dump(mode="json"),
        licenses=dict(recipe.licenses),
    )


def _artifact(record: RunRecord, storage: Storage, step: str) -> Artifact | None:
    done = record.stages.get(step)
    if done is None or done.stage_key is None:
        return None
    try:
        ref = storage.find(done.stage_key)
    except DamagedRef:
        return None
    return ref.artifact if ref is not None and ref.artifact.digest == done.digest else None
