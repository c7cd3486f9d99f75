"""``vantage resume``: go on with one run, from the recipe that it was started with."""

from typing import Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, RUN_HELP, AsJson, Place, Strict, Verbose, complete_run
from vantage.cli.output import explained, warn, workspace_at
from vantage.cli.run import finish, screen_of


def resume(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)],
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Go on with one run, whatever its status, from the recipe that it was started with."""
    with explained(verbose):
        from vantage.flows.execution import execute
        from vantage.runs.names import named_run
        from vantage.runs.run import acquire_run_by_id, damaged_runs

        place = workspace_at(workspace)
        run_id = named_run(place, run_id, "resume")
        warn(damaged_runs(place), skip=run_id)
        with acquire_run_by_id(place, run_id) as taken:
            record = execute(taken, screen_of(as_json), strict=strict, verbose=verbose)
        finish(record, as_json=as_json)
