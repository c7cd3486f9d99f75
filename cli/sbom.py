"""``vantage sbom``: write the bill of materials of an artifact."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, Place, Verbose, complete_run
from vantage.cli.output import explained, workspace_at

if TYPE_CHECKING:
    from vantage.review.diff.sides import Side
    from vantage.runs.workspace import Workspace


def sbom(
    named: Annotated[
        str,
        typer.Argument(
            metavar="RUN[/STAGE]|MODEL",
            help="A run (its published policy, else its last), a stage of it (or model, data.NAME of its recipe), or a "
            "registered model of MLflow: NAME, NAME@ALIAS, NAME/VERSION.",
            autocompletion=complete_run,
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Write to this file. Default: standard output."),
    ] = None,
    workspace: Place = DEFAULT_WORKSPACE,
    verbose: Verbose = False,
) -> None:
    """Write a CycloneDX 1.6 bill of materials: what was installed where an artifact was made, and what it was made of."""
    with explained(verbose):
        text = _bill(workspace_at(workspace), named)
        if to is None:
            print(text, end="")
            return
        from vantage.storage.durable_files import replace_file

        replace_file(to.expanduser().absolute(), text.encode())
        print(f"{to}: {text.count(chr(10)):,} lines")


def _bill(place: "Workspace", named: str) -> str:
    from vantage.review.diff.sides import find_side
    from vantage.review.exports.bills import bill_of
    from vantage.runs.meanings import MADE, Command
    from vantage.runs.run import read_run
    from vantage.runs.workspace import RunError

    accepted = Command("sbom", MADE)
    side = find_side(place, named, command=accepted)
    if side.subject.stage is None:
        side = find_side(place, f"run:{side.subject.run_id}/{_main_stage(side)}", command=accepted)
    step, run_id = side.subject.stage or "", str(side.subject.run_id)
    if step not in side.steps or side.steps[step].artifact is None:
        raise RunError(f"{step} of run {run_id} has no artifact in the store; run the same recipe again")
    bill = bill_of(place, read_run(place, run_id), step)
    if bill is None:
        raise RunError(
            f"{step} of run {run_id}: what was installed where it was made is not recorded (it was made by an "
            "earlier version, or the list was removed from the store); run the recipe in a new workspace to record it"
        )
    return bill


def _main_stage(side: "Side") -> str:
    """Return the stage that the run publishes, else its last one that made a policy."""
    from vantage.runs.workspace import RunError

    published = [each.stage for each in side.recipe.publish]
    policies = [
        name
        for name, step in side.steps.items()
        if step.artifact is not None and step.artifact.kind == "policy"
    ]
    ready = [name for name in published if name in side.steps and side.steps[name].artifact is not None]
    if not ready and not policies:
        raise RunError(
            f"run {side.subject.run_id} has made no policy; name a stage: {side.subject.run_id}/STAGE"
        )
    return (ready or policies[-1:])[0]
