"""``vantage status``: show the progress of runs, and damage."""

from typing import Annotated

import typer

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.app import DEFAULT_WORKSPACE, RUN_HELP, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_damage, print_json, warn, workspace_at


def status(
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help=f"{RUN_HELP} All runs if none is named.", autocompletion=complete_run
        ),
    ] = None,
    workspace: Place = DEFAULT_WORKSPACE,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read every stored byte again (about 1 GB/s), not only names and sizes."
        ),
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show the runs of a workspace, or the stages of one run with their progress; name what is damaged."""
    with explained(verbose):
        from vantage.runs.console import open_console, show_run, show_runs
        from vantage.runs.names import named_run
        from vantage.runs.run import damaged_runs, read_run, read_runs
        from vantage.runs.status import run_state

        place = workspace_at(workspace)
        run_id = None if run_id is None else named_run(place, run_id, "status")
        damaged = damaged_runs(place)
        warn(damaged, skip=run_id)
        records = [read_run(place, run_id)] if run_id else read_runs(place)
        views = [run_state(place, record, verify=verify) for record in records]
        if as_json:
            runs = {"runs": [view.as_json() for view in views], "damaged": damaged}
            print_json(views[0].as_json() if run_id else runs)
        elif run_id:
            show_run(open_console(), views[0])
        else:
            show_runs(open_console(), views, place.address)
        for view in views:
            for what, problems in view.damage.items():
                print_damage(view.record.run_id, what, problems)
        if any(view.damage or view.contradictions for view in views):
            raise typer.Exit(ExitCode.STORAGE)
