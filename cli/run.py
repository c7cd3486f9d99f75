"""``vantage run``: run a recipe, or resume its unfinished run."""

import sys
from typing import TYPE_CHECKING, Any

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Set, Source, Strict, Verbose
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from vantage.runs.console import Screen
    from vantage.runs.record import RunRecord


def run(
    recipe: Source,
    overrides: Set = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Run a recipe, or go on with its unfinished run; what is already made is reused."""
    with explained(verbose):
        from vantage.flows.execution import execute
        from vantage.ledger.tracking import check_configured
        from vantage.runs.names import recipe_source
        from vantage.runs.resolving import load_resolved
        from vantage.runs.run import acquire_run
        from vantage.signing.before_runs import check_signing

        recipe = recipe_source(recipe, "run")
        resolved, chosen = load_resolved(recipe, overrides or [])
        place = workspace_at(workspace)
        check_signing(resolved, place)
        check_configured()
        with acquire_run(place, resolved, source=recipe, overrides=overrides or ()) as started:
            record = execute(started, screen_of(as_json), strict=strict, verbose=verbose, chosen=chosen)
        finish(record, as_json=as_json)


def screen_of(as_json: bool) -> "Screen":
    """Return the console: standard error with ``--json``, else standard output."""
    from vantage.runs.console import Screen, open_console

    return Screen(open_console(sys.stderr if as_json else sys.stdout))


def finish(record: "RunRecord", *, as_json: bool) -> None:
    """Exit with the code of the run's outcome; with ``--json``, print a summary."""
    from vantage.flows.execution import exit_code

    if as_json:
        print_json(summary(record))
    raise typer.Exit(exit_code(record))


def summary(record: "RunRecord") -> dict[str, Any]:
    """Return the last line of `run --json`."""
    return {
        "run_id": record.run_id,
        "status": record.status,
        "stages": {
            name: stage.model_dump(mode="json", include={"status", "stage_key", "digest", "metrics"})
            for name, stage in record.stages.items()
        },
    }
