"""``vantage plan``: show the action for each stage, and why."""

import typer

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Set, Source, Strict, Verbose
from vantage.cli.output import explained, print_json, warn, workspace_at


def plan(
    recipe: Source,
    overrides: Set = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Say for each stage whether it would be reused, resumed or run, and why. Changes nothing."""
    with explained(verbose):
        from vantage.attempts.machine import check_extras
        from vantage.flows.saving_time import saving_warnings, write_rate
        from vantage.ledger.tracking import check_configured
        from vantage.runs.console import open_console
        from vantage.runs.names import recipe_source
        from vantage.runs.plan_table import show_plan
        from vantage.runs.planning import check_drift, damage, plan_warnings
        from vantage.runs.planning import plan as plan_steps
        from vantage.runs.resolving import load_resolved
        from vantage.runs.run import damaged_runs, next_run, read_runs
        from vantage.signing.before_runs import check_signing, signing_warnings

        recipe = recipe_source(recipe, "plan")
        resolved, chosen = load_resolved(recipe, overrides or [])
        check_extras(resolved)
        place = workspace_at(workspace)
        check_signing(resolved, place)
        check_configured()
        warn(damaged_runs(place))
        resolved, approvals = next_run(place, resolved)
        steps = plan_steps(resolved, place.existing_storage, read_runs(place), approvals=approvals)
        warnings = [
            *plan_warnings(resolved, steps),
            *saving_warnings(resolved, steps, folder=place.root, rate=write_rate),
            *signing_warnings(resolved, place),
        ]
        if as_json:
            listed = [step.as_json() for step in steps]
            shown = {
                "recipe": resolved.recipe,
                "steps": listed,
                "warnings": warnings,
                "chosen": chosen,
            }
            print_json(shown)
        else:
            show_plan(
                open_console(),
                steps,
                heading=f"{resolved.recipe} · {place.address}",
                warnings=warnings,
                chosen=chosen,
            )
        if strict:
            check_drift(steps)
        if damage(steps):
            raise typer.Exit(ExitCode.STORAGE)
