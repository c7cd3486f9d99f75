"""``vantage plan``: show the action for each stage, and why."""

import typer

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Only, Place, Set, Source, Strict, Until, Verbose
from vantage.cli.output import explained, print_json, warn, workspace_at


def plan(
    recipe: Source,
    overrides: Set = None,
    workspace: Place = DEFAULT_WORKSPACE,
    until: Until = None,
    only: Only = None,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Say for each stage whether it would be reused, resumed or run, and why. Changes nothing."""
    with explained(verbose):
        from vantage.flows.shown_plan import plan_recipe
        from vantage.runs.console import open_console
        from vantage.runs.names import recipe_source
        from vantage.runs.plan_table import show_plan
        from vantage.runs.planning import check_drift, damage
        from vantage.runs.run import damaged_runs
        from vantage.schemas.loading.part_of_recipe import part_named

        source, place = recipe_source(recipe, "plan"), workspace_at(workspace)
        part = part_named(until, only)
        warn(damaged_runs(place))
        planned = plan_recipe(source, overrides or [], place, part=part)
        if as_json:
            print_json(
                {
                    "recipe": planned.recipe.recipe,
                    "steps": [step.as_json() for step in planned.steps],
                    "warnings": planned.warnings,
                    "chosen": planned.chosen,
                }
            )
        else:
            show_plan(
                open_console(),
                planned.steps,
                heading=" · ".join(map(str, filter(None, (planned.recipe.recipe, place.address, part)))),
                warnings=planned.warnings,
                chosen=planned.chosen,
            )
        if strict:
            check_drift(planned.steps)
        if damage(planned.steps):
            raise typer.Exit(ExitCode.STORAGE)
