"""Find the steps of a run from which a model was made, with the refs of their artifacts."""

from collections.abc import Collection

from vantage.runs.record import RunRecord
from vantage.runs.view import Broken, Missing, NotMade, Replaced, RunView
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.storage.refs import Ref


class NotStored(RunError):
    """The store has another artifact than the run's record names, or none."""


def lineage(record: RunRecord, *steps: str) -> list[str]:
    """Return the steps and every step from which they were made, in the order of the recipe."""
    reads, found, waiting = dependencies(record.recipe), set[str](), [*steps]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += reads[name].values()
    return [name for name in ordered_steps(record.recipe) if name in found]


def made_steps(record: RunRecord) -> list[str]:
    """Return every step of a run that has an artifact."""
    return [
        step
        for step in ordered_steps(record.recipe)
        if step in record.stages and record.stages[step].digest and record.stages[step].stage_key
    ]


def refs_of(workspace: Workspace, record: RunRecord, steps: Collection[str]) -> dict[str, Ref]:
    """Return step → ref of the artifact that the run's record names.

    Raises:
        NotStored: there is no ref, it is that of another artifact, or the artifact was made from another input than the
            recorded one.
    """
    run = RunView.of(workspace, record)
    return {step: _ref(run, record, step) for step in steps}


def _ref(run: RunView, record: RunRecord, step: str) -> Ref:
    what = f"{step} of run {record.run_id}"
    match run.ref(step):
        case NotMade() as why:
            raise NotStored(why)
        case Replaced(ref=other):
            raise NotStored(
                f"{what} is {str(record.stages[step].digest)[:12]} in the run's record and {other.artifact.digest[:12]} in "
                f"the store; it was made again by run {other.run_id}, or one of the two was edited: `vantage audit "
                f"{record.run_id}`"
            )
        case Missing():
            raise NotStored(
                f"the store has no artifact of {what} any longer; run the recipe again, which makes it anew"
            )
        case Broken(cause=cause):
            raise NotStored(f"{what} is damaged ({cause}); run the recipe again")
        case Ref() as ref:
            _check_parents(ref, record, step)
            return ref


def _check_parents(ref: Ref, record: RunRecord, step: str) -> None:
    """Raise NotStored if the artifact was made from another input than the recorded one."""
    for role, read in dependencies(record.recipe)[step].items():
        digest = record.stages[read].digest if read in record.stages else None
        if ref.artifact.parents.get(role, digest) != digest:
            raise NotStored(
                f"{step} of run {record.run_id} was made from another {role} than {read} of this run; `vantage audit "
                f"{record.run_id}` shows which"
            )
