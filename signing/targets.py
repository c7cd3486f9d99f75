"""Find the artifacts that ``vantage sign`` should sign: of a run, a stage of one, or a registered model."""

from dataclasses import dataclass

from vantage.runs.meanings import MADE, Command, OfRun, RegisteredNamed, RunNamed
from vantage.runs.names import Names
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.registry import MlflowRegistry
from vantage.runs.run import read_run
from vantage.runs.workspace import RunError, Workspace
from vantage.signing.lineage import lineage, made_steps

SIGN = Command("sign", MADE)


@dataclass(frozen=True)
class Target:
    """Steps of one run, in the order of its recipe."""

    record: RunRecord
    steps: list[str]


def find_target(workspace: Workspace, named: str) -> Target:
    """Find the steps to which ``named`` refers.

    Args:
        workspace: the workspace with the run.
        named: a name as docs/names.md describes it. A run means every step with an artifact. A stage includes its inputs at any
            depth. A registered model includes the evaluations for which its aliases wait, and their inputs at any
            depth.

    Raises:
        RunError: there is no run, stage or model of this name, or it has no artifact yet.
        vantage.ledger.to_mlflow.published_models.RegistryUnavailable: MLflow does not answer.
    """
    registry = MlflowRegistry(workspace)
    found = Names(workspace, registry=registry).resolve(named, SIGN)
    if isinstance(found, RegisteredNamed):
        return _registered(workspace, registry, found)
    assert isinstance(found, OfRun), "it accepts nothing else"
    run_id, step = found.run_id, None if isinstance(found, RunNamed) else found.step
    record = read_run(workspace, run_id)
    if record.status == REMOVED:
        raise RunError(f"run {run_id} was removed by `vantage gc`; run its recipe again")
    made = made_steps(record)
    if step and step not in made:
        there = f"it has made {', '.join(made)}" if made else "it has made nothing yet"
        raise RunError(f"run {run_id} has no artifact of {step}; {there}")
    if not made:
        raise RunError(f"run {run_id} has made nothing yet; `vantage status {run_id}` shows it")
    return Target(record, lineage(record, step) if step else made)


def _registered(workspace: Workspace, registry: MlflowRegistry, named: RegisteredNamed) -> Target:
    """Return the step that made a registered model, the steps for which its aliases wait, and the inputs of these at
    any depth."""
    found, name = registry.published(named), named.name
    record = read_run(workspace, found.run_id)
    for step in made_steps(record):
        if record.stages[step].digest == found.digest and record.stages[step].stage_key == found.stage_key:
            waited_for = [
                each.after
                for each in record.recipe.publish
                if each.registered_model == name and each.after in made_steps(record)
            ]
            return Target(record, lineage(record, step, *waited_for))
    raise RunError(
        f"{name} version {found.version} is {found.digest[:12]}, which no step of run {found.run_id} has made; "
        f"`vantage audit {name}/{found.version}` shows what differs"
    )
