"""The command line. Everything heavy is imported by the command that needs it: help and plans answer at once."""

import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.exit_codes import MEANINGS, ExitCode
from flows.launchers.disk_faults import is_disk_fault
from flows.launchers.safe_stream import SafeStream
from schemas.safe_text import safe_text

if TYPE_CHECKING:
    from flows.runs.resolving import ChosenRates
    from flows.runs.run import RunRecord, Workspace

DEFAULT_WORKSPACE = Path(".vantage")
RUN_HELP = "A run's id, the beginning of one, its number, or `latest`."


def _complete_recipe(incomplete: str) -> list[str]:
    from schemas.loading.recipe_file import builtin_recipes

    return [name for name in builtin_recipes() if name.startswith(incomplete)]


def _complete_run(context: typer.Context, incomplete: str) -> list[str]:
    from flows.runs.run import run_ids
    from flows.runs.run_ids import LATEST

    known = [LATEST, *run_ids(_workspace(context.params.get("workspace") or DEFAULT_WORKSPACE))]
    return [run_id for run_id in known if run_id.startswith(incomplete)]


Source = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe's file, or the name of a built-in one.",
        autocompletion=_complete_recipe,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a field: stages.policy.algorithm=ppo. Repeatable."
    ),
]
Folder = Annotated[
    Path,
    typer.Option(
        "--workspace", metavar="DIR", envvar="VANTAGE_WORKSPACE", help="Runs, artifacts and ledger."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Machine-readable output, and only that, on standard output.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse to reuse what was made with other code or libraries.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the frameworks' own logs, and tracebacks.")
]

app = typer.Typer(
    name="vantage",
    help="Declarative RLHF pipelines: one recipe from demonstrations to an evaluated policy.",
    epilog=f"Exit codes: {', '.join(f'{int(code)} {meaning}' for code, meaning in MEANINGS.items())}.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"vantage {version('vantage-rlhf')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declarative RLHF pipelines: one recipe from demonstrations to an evaluated policy."""


@app.command()
def run(
    recipe: Source,
    overrides: Set = None,
    workspace: Folder = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Run a recipe, or go on with its unfinished run; what is already made is reused."""
    with _explained(verbose):
        from flows.runs.resolving import load_resolved
        from flows.runs.run import drive

        resolved, chosen = load_resolved(recipe, overrides or [])
        with drive(_workspace(workspace), resolved, source=recipe, overrides=overrides or ()) as started:
            _execute(started, as_json=as_json, strict=strict, verbose=verbose, chosen=chosen)


@app.command()
def sweep(
    source: Annotated[
        str, typer.Argument(metavar="SWEEP", help="A sweep's file, or the name of a built-in one.")
    ],
    overrides: Set = None,
    arms: Annotated[str | None, typer.Option("--arms", metavar="A,B", help="These arms alone.")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", metavar="1,2", help="These seeds alone.")] = None,
    workspace: Folder = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Run variants of one recipe over paired seeds and compare them; what they share is made once."""
    with _explained(verbose):
        from flows.commands.console import Screen, open_console
        from flows.sweeps.sweep import run_sweep
        from schemas.sweep import load_sweep

        chosen = {"arms": arms and arms.split(","), "seeds": seeds and seeds.split(",")}
        swept = load_sweep(source, overrides or [], **chosen)
        screen = Screen(open_console(sys.stderr if as_json else sys.stdout))
        end = run_sweep(swept, _workspace(workspace), screen, source=source, strict=strict, verbose=verbose)
        if as_json:
            _print_json(end.as_json())
        raise typer.Exit(end.exit_code)


@app.command()
def resume(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=_complete_run)],
    workspace: Folder = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Go on with one run, whatever its status, from the recipe that it was started with."""
    with _explained(verbose):
        from flows.runs.run import damaged_runs, drive_again
        from flows.runs.run_ids import find_run

        place = _workspace(workspace)
        run_id = find_run(place, run_id)
        _warn(damaged_runs(place), but=run_id)
        with drive_again(place, run_id) as taken:
            _execute(taken, as_json=as_json, strict=strict, verbose=verbose)


@app.command()
def plan(
    recipe: Source,
    overrides: Set = None,
    workspace: Folder = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Say for each stage whether it would be reused, resumed or run, and why. Changes nothing."""
    with _explained(verbose):
        from flows.commands.console import open_console, show_plan
        from flows.runs.planning import cautions, damage, refuse_drift
        from flows.runs.planning import plan as plan_steps
        from flows.runs.resolving import load_resolved
        from flows.runs.run import damaged_runs, read_runs
        from storage.store import Store

        resolved, chosen = load_resolved(recipe, overrides or [])
        place = _workspace(workspace)
        store = Store(place.store) if place.store.is_dir() else None
        _warn(damaged_runs(place))
        steps = plan_steps(resolved, store, read_runs(place))
        if as_json:
            told = [step.as_json() for step in steps]
            shown = {
                "recipe": resolved.recipe,
                "steps": told,
                "warnings": cautions(resolved, steps),
                "chosen": chosen,
            }
            _print_json(shown)
        else:
            show_plan(
                open_console(),
                steps,
                heading=f"{resolved.recipe} · {place.root}",
                warnings=cautions(resolved, steps),
                chosen=chosen,
            )
        if strict:
            refuse_drift(steps)
        if damage(steps):
            raise typer.Exit(ExitCode.STORAGE)


@app.command()
def status(
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help=f"{RUN_HELP} All runs if none is named.", autocompletion=_complete_run
        ),
    ] = None,
    workspace: Folder = DEFAULT_WORKSPACE,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read every byte that is stored again (about 1 GB/s), not names and sizes alone."
        ),
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show the runs of a workspace, or the stages of one run and how far they are; say what is damaged."""
    with _explained(verbose):
        from flows.commands.console import open_console, show_run, show_runs
        from flows.runs.run import damaged_runs, read_run, read_runs
        from flows.runs.run_ids import find_run
        from flows.runs.status import look

        place = _workspace(workspace)
        run_id = None if run_id is None else find_run(place, run_id)
        damaged = damaged_runs(place)
        _warn(damaged, but=run_id)
        records = [read_run(place, run_id)] if run_id else read_runs(place)
        views = [look(place, record, verify=verify) for record in records]
        if as_json:
            runs = {"runs": [view.as_json() for view in views], "damaged": damaged}
            _print_json(views[0].as_json() if run_id else runs)
        elif run_id:
            show_run(open_console(), views[0])
        else:
            show_runs(open_console(), views, place.root)
        for view in views:
            for what, problems in view.damage.items():
                _warn_of_damage(view.record.run_id, what, problems)
        if any(view.damage for view in views):
            raise typer.Exit(ExitCode.STORAGE)


@app.command()
def schema(
    of_sweep: Annotated[bool, typer.Option("--sweep", help="That of a sweep.")] = False,
) -> None:
    """Print the JSON schema of a recipe, for editors."""
    from schemas.loading.json_schema import recipe_schema, sweep_schema

    _print_json(sweep_schema() if of_sweep else recipe_schema(), indent=2)


@app.command()
def doctor(workspace: Folder = DEFAULT_WORKSPACE, as_json: AsJson = False) -> None:
    """Check that this machine can run recipes: versions, disk, servers, processes, accelerators."""
    from flows.commands.console import open_console, show_findings
    from flows.commands.doctor import examine

    findings = list(examine(_workspace(workspace)))
    if as_json:
        _print_json([asdict(finding) for finding in findings])
    else:
        show_findings(open_console(), findings)
    if any(finding.verdict == "broken" for finding in findings):
        raise typer.Exit(ExitCode.UNAVAILABLE)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop a run
    sys.stderr = SafeStream(sys.stderr)  # errors hold what others wrote
    app()


def _execute(
    run: Any, *, as_json: bool, strict: bool, verbose: bool, chosen: "ChosenRates | None" = None
) -> None:
    """Drive a run, print how it ended, and end the process with the code that says so."""
    from flows.commands.console import Screen, open_console
    from flows.runs.execution import execute, exit_code

    # With --json, people read standard error.
    screen = Screen(open_console(sys.stderr if as_json else sys.stdout))
    record = execute(run, screen, strict=strict, verbose=verbose, chosen=chosen)
    if as_json:
        _print_json(summary(record))
    raise typer.Exit(exit_code(record))


def summary(record: "RunRecord") -> dict[str, Any]:
    """What `run --json` prints as its last line."""
    return {
        "run_id": record.run_id,
        "status": record.status,
        "stages": {
            name: stage.model_dump(mode="json", include={"status", "stage_key", "digest", "metrics"})
            for name, stage in record.stages.items()
        },
    }


@contextmanager
def _explained(verbose: bool) -> Iterator[None]:
    """Errors as one sentence for a person and an exit code for a program; the traceback only with ``-v``."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except Exception as error:
        if verbose:
            traceback.print_exc()
        code = _code_of(error)
        if code == ExitCode.UNAVAILABLE:
            # Prefect's loggers complain too, and leave their last line without its end.
            print(file=sys.stderr)
        print(f"vantage: {_told(error, code)}", file=sys.stderr)
        if code == ExitCode.UNAVAILABLE:
            # Prefect's own threads would go on for minutes to reach a server that has gone.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        raise typer.Exit(code) from None


def _warn(messages: Iterable[str], *, but: str | None = None) -> None:
    """What is no reason to stop, on standard error; not of run ``but``, whose own error says so."""
    for message in messages:
        if but is None or f"/{but}/" not in message:
            print(f"vantage: warning: {message}", file=sys.stderr)


def _told(error: Exception, code: int) -> str:
    """What a person reads of an error."""
    if code != ExitCode.INTERNAL:
        return str(error)
    return f"{type(error).__name__}: {error} (this should not happen; -v shows the traceback)"


def _code_of(error: Exception) -> ExitCode:
    """The exit code of an error that no stage reported."""
    if is_disk_fault(error):
        return ExitCode.STORAGE
    if isinstance(
        error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | ValueError
    ):
        return ExitCode.BAD_INPUT
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ == "ServerUnavailable":
        return ExitCode.UNAVAILABLE
    return ExitCode.STORAGE if isinstance(error, OSError) else ExitCode.INTERNAL


def _warn_of_damage(run_id: str, what: str, problems: Iterable[str]) -> None:
    """A line for each fault, and what can be done."""
    for problem in problems:
        print(f"vantage: run {run_id}: {what} is damaged: {problem}", file=sys.stderr)
    print(f"vantage: {what}: run the same recipe again, which makes it anew", file=sys.stderr)


def _workspace(folder: Path) -> "Workspace":
    from flows.runs.run import Workspace

    return Workspace(folder.absolute())


def _print_json(value: Any, *, indent: int | None = None) -> None:
    try:
        print(safe_text(json.dumps(value, ensure_ascii=False, indent=indent)), flush=True)
    except BrokenPipeError:  # `| head` has seen enough, which is no reason to fail
        from flows.commands.console import forget_reader

        forget_reader(sys.stdout)
