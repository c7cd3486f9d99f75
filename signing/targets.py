"""What ``vantage sign`` is asked to sign: a run, a stage of one, or a registered model."""

from dataclasses import dataclass

from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.run import read_run
from vantage.runs.run_ids import find_run
from vantage.runs.workspace import RunError, Workspace
from vantage.signing.lineage import lineage, made_steps


@dataclass(frozen=True)
class Target:
    """Steps of one run, in the order of its recipe."""

    record: RunRecord
    steps: list[str]


def find_target(workspace: Workspace, named: str) -> Target:
    """The steps that ``named`` means.

    Args:
        workspace: with the run.
        named: ``RUN`` (every step with an artifact), ``RUN/STAGE``, or ``NAME``, ``NAME@ALIAS``, ``NAME/VERSION`` of a
            registered model (also with ``models:/`` before it): the step, the evaluations on which its aliases wait, and all
            that these were made from.

    Raises:
        RunError: there is no such thing, or it has no artifact yet.
        vantage.ledger.to_mlflow.published_models.RegistryUnavailable: MLflow does not answer.
    """
    if "@" in named or named.startswith("models:/"):
        return _registered(workspace, named.removeprefix("models:/"))
    run, _, step = named.partition("/")
    try:
        run_id = find_run(workspace, run)
    except RunError as unknown:
        try:
            return _registered(workspace, named)
        except RunError:
            raise unknown from None
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


def _registered(workspace: Workspace, named: str) -> Target:
    """The step that made a registered model, what its aliases wait for, and all that these were made from."""
    from vantage.ledger import tracking

    name, _, alias = named.partition("@")
    name, _, version = name.partition("/")
    address = tracking.address(None, workspace.root)
    if tracking.is_missing_database(address) or (version and not version.isdecimal()):
        raise RunError(f"{named} is no run, and no model that MLflow has; `vantage status` lists the runs")
    tracking.set_up_client()
    from vantage.ledger.to_mlflow.published_models import NoSuchModel, find_published  # imports MLflow

    try:
        found = find_published(address, name, version=version or None, alias=alias or None)
    except NoSuchModel as error:
        raise RunError(str(error)) from None
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
