"""``vantage diff``: show what differs between two runs, stages, models or recipes."""

from typing import Annotated

import typer

from vantage.attempts.exit_codes import ExitCode
from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_json, workspace_at

_NAMED = (
    "A run (its id, the beginning of one, its number, or `latest`), RUN/STAGE, a registered model of MLflow (NAME, NAME@ALIAS, "
    "NAME/VERSION), a recipe's file, or the name of a built-in recipe."
)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_NAMED, autocompletion=complete_run)],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B", help="What A is compared with, named in the same ways.", autocompletion=complete_run
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a field of the recipe (of B, if A and B are both recipes). Repeatable.",
        ),
    ] = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show what differs: recipe, stages, rows, code, gates, metrics. Exit code 0: the same, 1: they differ."""
    with explained(verbose):
        from vantage.review.diff.compare import compare
        from vantage.review.diff.sides import find_sides

        place = workspace_at(workspace)
        found = compare(place, *find_sides(place, a, b, overrides or ()))
        if as_json:
            print_json({"is_same": found.is_same, **found.model_dump(mode="json")})
        else:
            from vantage.review.diff.printed import show_difference
            from vantage.runs.console import open_console

            show_difference(open_console(), found)
        if not found.is_same:
            raise typer.Exit(ExitCode.AUDIT_FAILED)  # 1, as `diff` itself returns
