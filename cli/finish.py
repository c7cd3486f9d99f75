"""``vantage finish``: end a running stage with the result that it has."""

from typing import Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, RUN_HELP, Place, Verbose, complete_run
from vantage.cli.output import explained, workspace_at


def finish(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)],
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="The stage that is to end.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="The reason; it is recorded with the artifact.")
    ] = "",
    workspace: Place = DEFAULT_WORKSPACE,
    verbose: Verbose = False,
) -> None:
    """End a training stage with what it has; the run goes on with an artifact that is marked as finished early."""
    with explained(verbose):
        from vantage.flows.finishing import finish_stage
        from vantage.runs.names import named_run
        from vantage.runs.run import read_run

        place = workspace_at(workspace)
        record = read_run(place, named_run(place, run_id, "finish"))
        typer.echo(finish_stage(place, record, stage, reason=reason))
