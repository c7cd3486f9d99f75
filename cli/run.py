"""``vantage run``: run a recipe, or resume its unfinished run."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Only, Place, Set, Source, Strict, Until, Verbose
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from vantage.runs.console import Screen
    from vantage.runs.record import RunRecord
    from vantage.runs.workspace import Workspace


def run(
    recipe: Source,
    overrides: Set = None,
    workspace: Place = DEFAULT_WORKSPACE,
    until: Until = None,
    only: Only = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return when the run has begun; it goes on without this terminal."),
    ] = False,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Run a recipe, or go on with its unfinished run; what is already made is reused."""
    with explained(verbose):
        from vantage.flows.execution import execute
        from vantage.flows.shown_plan import plan_recipe
        from vantage.ledger.tracking import check_configured
        from vantage.runs.names import recipe_source
        from vantage.runs.resolving import load_resolved
        from vantage.runs.run import acquire_run
        from vantage.schemas.loading.part_of_recipe import part_named
        from vantage.signing.before_runs import check_signing

        recipe = recipe_source(recipe, "run")
        part = part_named(until, only)
        place = workspace_at(workspace)
        resolved, chosen = load_resolved(recipe, overrides or [], part=part, workspace=place)
        if part is not None and part.extent == "only":
            # this refuses a bad part before a run exists
            plan_recipe(recipe, overrides or [], place, part=part)
        check_signing(resolved, place)
        check_configured()
        if detach:
            words = [word for each in overrides or () for word in ("--set", each)]
            words += [] if part is None else [f"--{part.extent}={part.stage}"]
            words += [flag for flag, is_set in (("--strict", strict), ("--verbose", verbose)) if is_set]
            _detach([recipe, "--workspace", place.address, *words], place, as_json=as_json)
            return
        with acquire_run(
            place,
            resolved,
            source=recipe,
            overrides=overrides or (),
            part=None if part is None else str(part),
        ) as started:
            record = execute(started, screen_of(as_json), strict=strict, verbose=verbose, chosen=chosen)
        finish(record, as_json=as_json)


def _detach(arguments: list[str], place: "Workspace", *, as_json: bool) -> None:
    """Start the run and print how to follow and to stop it. Exits with the run's code if it fails to begin."""
    from rich.text import Text

    from vantage.cli.detached import start_detached
    from vantage.runs.console import open_console
    from vantage.runs.own_commands import own_command
    from vantage.runs.wrapped_lines import print_line, print_whole

    started = start_detached(arguments, place)
    if started.run_id is None:
        sys.stderr.write(started.log.read_text(errors="replace"))
        started.log.unlink()
        raise typer.Exit(started.exit_code or 0)
    if as_json:
        print_json({"run_id": started.run_id, "pid": started.pid, "log": str(started.log)})
        return
    console = open_console(sys.stdout)
    begun = f"run {started.run_id} has begun (process {started.pid}); it goes on without this terminal"
    print_line(console, Text(begun))
    print_whole(console, "  prints  ", str(started.log))
    for what, command in (("status", "status"), ("stop", "cancel")):
        line = own_command(command, started.run_id, "--workspace", place.address)
        print_whole(console, f"  {what:<8}", line)


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
