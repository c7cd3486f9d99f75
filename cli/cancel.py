"""``vantage cancel``: stop a run wherever it is executed; its state is saved."""

import time
from typing import Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, RUN_HELP, Place, Verbose, complete_run
from vantage.cli.output import explained, workspace_at


def cancel(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)],
    workspace: Place = DEFAULT_WORKSPACE,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no process of the run is left.")] = False,
    verbose: Verbose = False,
) -> None:
    """Stop a run, on whatever machines it is; running stages save their state, and the same command resumes it."""
    with explained(verbose):
        from vantage.flows.cancelling import attempts_under_way, cancel_run
        from vantage.runs.names import named_run
        from vantage.runs.run import is_active, read_run

        place = workspace_at(workspace)
        record = read_run(place, named_run(place, run_id, "cancel"))
        asked = cancel_run(place, record)
        for line in asked or [f"nothing of run {record.run_id} is running"]:
            typer.echo(line)
        while wait and (is_active(place, record.run_id) or attempts_under_way(place, record)):
            time.sleep(1.0)
