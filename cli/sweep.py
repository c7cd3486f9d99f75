"""``vantage sweep``: run variants of one recipe over paired seeds."""

import sys
from typing import Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Set, Strict, Verbose
from vantage.cli.output import explained, print_json, workspace_at


def sweep(
    source: Annotated[
        str, typer.Argument(metavar="SWEEP", help="A sweep's file, or the name of a built-in one.")
    ],
    overrides: Set = None,
    arms: Annotated[str | None, typer.Option("--arms", metavar="A,B", help="Run only these arms.")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", metavar="1,2", help="Run only these seeds.")] = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Run variants of one recipe over paired seeds and compare them; what they share is made once."""
    with explained(verbose):
        from vantage.flows.sweeps.sweep import run_sweep
        from vantage.runs.console import Screen, open_console
        from vantage.schemas.sweep import load_sweep

        chosen = {"arms": arms and arms.split(","), "seeds": seeds and seeds.split(",")}
        swept = load_sweep(source, overrides or [], **chosen)
        screen = Screen(open_console(sys.stderr if as_json else sys.stdout))
        end = run_sweep(swept, workspace_at(workspace), screen, source=source, strict=strict, verbose=verbose)
        if as_json:
            print_json(end.as_json())
        raise typer.Exit(end.exit_code)
