"""``vantage report``: write one HTML page about a run."""

from pathlib import Path
from typing import Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, RUN_HELP, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_json, workspace_at


def report(
    named: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)],
    workspace: Place = DEFAULT_WORKSPACE,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="FILE", help="Write the page to this file, in place of the run's folder."
        ),
    ] = None,
    annex: Annotated[
        str | None,
        typer.Option(
            "--annex",
            metavar="NAME",
            help="End the page with an annex. ai-act: the questions of Annex XI of the EU AI Act, answered from the record.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write one HTML page about a run: lineage, gates, curves, samples, cost. It needs no other file and no network."""
    with explained(verbose):
        from vantage.review.reports.files import ANNEXES, write_report
        from vantage.runs.names import named_run

        if annex is not None and annex not in ANNEXES:
            raise ValueError(f"--annex {annex} is not known; name one of: {', '.join(ANNEXES)}")
        place = workspace_at(workspace)
        file = write_report(place, named_run(place, named, "report"), to, annex=annex).absolute()
        if as_json:
            print_json({"report": str(file)})
        else:
            print(file)
        if show and not _opened(file):
            raise ValueError(f"no browser could be started on this machine; open {file} yourself")


def _opened(file: Path) -> bool:
    import webbrowser

    try:
        return webbrowser.open(file.as_uri())
    except webbrowser.Error:
        return False
