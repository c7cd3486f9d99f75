"""The steps of a run that a model was made from, with the refs of their artifacts."""

from collections.abc import Collection

from vantage.runs.record import RunRecord
from vantage.runs.workspace import RunError
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.storage.refs import DamagedRef, Ref
from vantage.storage.storage import Storage


class NotStored(RunError):
    """The store has another artifact than the run's record names, or none."""


def lineage(record: RunRecord, *steps: str) -> list[str]:
    """The steps and every step that they were made from, in the order of the recipe."""
    reads, found, waiting = dependencies(record.recipe), set[str](), [*steps]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += reads[name].values()
    return [name for name in ordered_steps(record.recipe) if name in found]


def made_steps(record: RunRecord) -> list[str]:
    """Every step of a run that has an artifact."""
    return [
        step
        for step in ordered_steps(record.recipe)
        if step in record.stages and record.stages[step].digest and record.stages[step].stage_key
    ]


def refs_of(storage: Storage | None, record: RunRecord, steps: Collection[str]) -> dict[str, Ref]:
    """Step → ref of the artifact that the run's record names.

    Raises:
        NotStored: there is none, or it is another one, or it was made from another input than the record says.
    """
    return {step: _ref(storage, record, step) for step in steps}


def _ref(storage: Storage | None, record: RunRecord, step: str) -> Ref:
    stage, what = record.stages.get(step), f"{step} of run {record.run_id}"
    if stage is None or stage.stage_key is None or stage.digest is None:
        raise NotStored(f"{what} has no artifact yet; `vantage status {record.run_id}` shows how far it is")
    try:
        ref = None if storage is None else storage.find(stage.stage_key)
    except (DamagedRef, ValueError) as error:  # ValueError: what the record has is no key
        raise NotStored(f"{what} is damaged ({error}); run the recipe again") from error
    if ref is None:
        raise NotStored(
            f"the store has no artifact of {what} any longer; run the recipe again, which makes it anew"
        )
    if ref.artifact.digest != stage.digest:
        raise NotStored(
            f"{what} is {stage.digest[:12]} in the run's record and {ref.artifact.digest[:12]} in the store; it was made "
            f"again by run {ref.run_id}, or one of the two was edited: `vantage audit {record.run_id}`"
        )
    for role, read in dependencies(record.recipe)[step].items():
        digest = record.stages[read].digest if read in record.stages else None
        if ref.artifact.parents.get(role, digest) != digest:
            raise NotStored(
                f"{what} was made from another {role} than {read} of this run; `vantage audit {record.run_id}` shows which"
            )
    return ref
