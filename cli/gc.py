"""``vantage gc``: remove what is no longer needed."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Verbose
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from vantage.flows.garbage_collection import Collection

_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_AGE = re.compile(r"(\d{1,9}(?:\.\d+)?)([mhd])")


def gc(
    workspace: Place = DEFAULT_WORKSPACE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed, and how many bytes.")
    ] = False,
    keep_last: Annotated[
        int | None,
        typer.Option(
            "--keep-last", metavar="N", min=0, help="Remove the runs of each recipe except its newest N."
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="Remove runs that ended longer ago than this: 30d, 12h, 45m. With --keep-last, a run is removed if both apply.",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Remove artifacts, checkpoints and left-overs that no run, no registered model and nobody at work needs.

    Without --keep-last and --older-than no run is removed. Pipelines may run meanwhile. A removed run leaves its
    run.json, a removed artifact its manifest, metrics and refs, so that it can still be said what it was.
    """
    with explained(verbose):
        from vantage.flows.garbage_collection import collect

        seconds = None if older_than is None else _seconds(older_than)
        found = collect(workspace_at(workspace), dry_run=dry_run, keep_last=keep_last, older_than=seconds)
        if as_json:
            print_json(found.as_json())
        else:
            _show(found, dry_run=dry_run)


def _show(found: "Collection", *, dry_run: bool) -> None:
    """Print what ``vantage gc`` removed, or would remove."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from vantage.runs.console import open_console

    console = open_console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("removed" if not dry_run else "would be removed", "name", "bytes"):
        table.add_column(column, no_wrap=True)
    for removal in found.removed:
        table.add_row(removal.kind, removal.name, f"{removal.num_bytes:,}" if removal.num_bytes else "")
    if found.removed:
        console.print(table)
    for what, names in (("still in use", found.in_use), ("MLflow has not got all of it yet", found.unsent)):
        for name in names:
            console.print(f"kept: {name} ({what})", soft_wrap=True)
    verb = "would be removed" if dry_run else "removed"
    console.print(f"{len(found.removed)} {verb}, {found.num_bytes:,} bytes")
    if found.num_records:
        noun = "artifact" if found.num_records == 1 else "artifacts"
        console.print(
            f"kept of {found.num_records} removed {noun}: manifest, metrics and refs, {found.record_bytes:,} bytes",
            soft_wrap=True,
        )


def _seconds(age: str) -> float:
    read = _AGE.fullmatch(age)
    if read is None:
        raise ValueError(
            f"--older-than={age!r} is no age; write days, hours or minutes, such as 30d, 12h or 45m"
        )
    return float(read[1]) * _SECONDS[read[2]]
