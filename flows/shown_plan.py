"""The plan of a run, shown before its first stage: on the command line, and where Prefect starts the run."""

from vantage.flows.saving_time import saving_warnings, write_rate
from vantage.ledger import tracking
from vantage.runs.console import Screen
from vantage.runs.plan_table import show_plan
from vantage.runs.planning import PlannedStep, check_drift, plan, plan_warnings
from vantage.runs.resolving import ChosenRates
from vantage.runs.run import Run, read_runs
from vantage.runs.workspace import Workspace
from vantage.signing.before_runs import signing_warnings


def planned(run: Run, screen: Screen, *, strict: bool, chosen: ChosenRates | None) -> list[PlannedStep]:
    """Plan the run and show the plan, with its warnings.

    Args:
        strict: refuse to reuse what was made with other code or libraries.
        chosen: learning rates that the recipe left open, shown with the plan.

    Raises:
        vantage.runs.planning.DriftError: ``strict``, and something that would be reused was made with others.
    """
    recipe = run.record.recipe
    steps = plan(
        recipe,
        run.workspace.existing_storage,
        read_runs(run.workspace),
        approvals=run.record.approvals,
    )
    heading = f"{recipe.recipe} · run {run.record.run_id}"
    warnings = [
        *plan_warnings(recipe, steps),
        *saving_warnings(recipe, steps, folder=run.workspace.root, rate=write_rate),
        *ledger_warnings(run.workspace),
        *signing_warnings(recipe, run.workspace),
    ]
    show_plan(screen.console, steps, heading=heading, warnings=warnings, chosen=chosen)
    if strict:
        check_drift(steps)
    return steps


def ledger_warnings(workspace: Workspace) -> list[str]:
    """Return a warning if several machines may use the workspace, and MLflow's database lies on this one."""
    if workspace.uri is None or tracking.address(None, workspace.root).startswith("http"):
        return []
    return [
        "MLFLOW_TRACKING_URI is not set: MLflow's records of this run are on this machine alone, and another machine that "
        "goes on with it writes its own; set it to a server that all machines reach"
    ]
