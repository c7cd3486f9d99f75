"""Plan a recipe, which changes nothing, or a run, whose plan is shown before its first stage."""

from collections.abc import Sequence
from dataclasses import dataclass

from vantage.attempts.machine import check_extras
from vantage.flows.saving_time import saving_warnings, write_rate
from vantage.ledger import tracking
from vantage.runs.console import Screen
from vantage.runs.plan_table import show_plan
from vantage.runs.planning import PlannedStep, check_drift, check_made, plan, plan_warnings
from vantage.runs.resolving import ChosenRates, load_resolved
from vantage.runs.run import Run, next_run, read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.loading.part_of_recipe import Part
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.signing.before_runs import check_signing, signing_warnings


@dataclass(frozen=True)
class RecipePlan:
    """The plan of the next run of a recipe."""

    recipe: ResolvedRecipe
    steps: list[PlannedStep]
    warnings: list[str]
    chosen: ChosenRates
    """Learning rates that the recipe left open."""


def plan_recipe(
    source: str, overrides: Sequence[str], workspace: Workspace, *, part: Part | None = None
) -> RecipePlan:
    """Plan the next run of a recipe, or of a part of it; nothing is written.

    Raises:
        vantage.schemas.problems.RecipeError: the recipe is invalid.
        ValueError: this installation or the workspace lacks something that the recipe needs; there is no such part, or
            the part is one stage whose inputs are not made.
    """
    resolved, chosen = load_resolved(source, overrides, part=part, workspace=workspace)
    check_extras(resolved)
    check_signing(resolved, workspace)
    tracking.check_configured()
    resolved, approvals = next_run(workspace, resolved)
    steps = plan(resolved, workspace.existing_storage, read_runs(workspace), approvals=approvals)
    if part is not None and part.extent == "only":
        check_made(steps, part.stage)
    warnings = [
        *plan_warnings(resolved, steps),
        *saving_warnings(resolved, steps, folder=workspace.root, rate=write_rate),
        *signing_warnings(resolved, workspace),
    ]
    return RecipePlan(resolved, steps, warnings, chosen)


def planned(run: Run, screen: Screen, *, strict: bool, chosen: ChosenRates | None) -> list[PlannedStep]:
    """Plan the run and show the plan, with its warnings.

    Args:
        strict: refuse to reuse artifacts that were made with other code or libraries.
        chosen: learning rates that the recipe left open, shown with the plan.

    Raises:
        vantage.runs.planning.DriftError: ``strict``, and an artifact to reuse was made with other code or libraries.
    """
    recipe = run.record.recipe
    steps = plan(
        recipe,
        run.workspace.existing_storage,
        read_runs(run.workspace),
        approvals=run.record.approvals,
    )
    part = f" · {run.record.part}" if run.record.part else ""
    heading = f"{recipe.recipe} · run {run.record.run_id}{part}"
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
    """Return a warning if several machines may use the workspace, and MLflow's database is on this one."""
    if workspace.uri is None or tracking.address(None, workspace.root).startswith("http"):
        return []
    return [
        "MLFLOW_TRACKING_URI is not set: MLflow's records of this run are on this machine alone, and another machine that "
        "goes on with it writes its own; set it to a server that all machines reach"
    ]
