"""`vantage run` from a resolved recipe to its end: plan, then either verify and record, or order the stages."""

import asyncio
import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from flows import servers
from flows.console import Screen, show_end, show_plan
from flows.exit_codes import ExitCode
from flows.launch import RUN_STAGE, warm_up
from flows.machine import this_machine
from flows.next_steps import after_closed_gates
from flows.own_commands import program
from flows.planning import needs_work, plan, refuse_drift
from flows.publishing import publish
from flows.resolving import ChosenRates
from flows.run_summary import model_folders, samples_heading, snippet_for
from flows.runs import Run, RunRecord, read_runs
from flows.stage_life import StageLife
from schemas.cautions import warnings
from schemas.recipe import Recipe
from tasks.ledger.run_ledger import Ledger
from tasks.storage.store import Store

QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PYTHONWARNINGS": "ignore",
}
"""What Prefect, MLflow and children are told where nobody asked for their logs, unless the user's environment says otherwise."""

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_CLIENT_MAX_RETRIES": "3",  # a server that has gone is given up after seconds, not minutes
}
"""What they are told in any case, unless the user's environment says otherwise."""


def execute(
    run: Run,
    screen: Screen,
    *,
    strict: bool = False,
    stage_function: str = RUN_STAGE,
    verbose: bool = False,
    chosen: ChosenRates | None = None,
) -> RunRecord:
    """Drive the run to its end, whatever that is; the record says which.

    ``chosen`` are the learning rates that the recipe left open, to be shown with the plan.

    Raises:
        flows.planning.Drifted: ``strict``, and something that would be reused was made with other code or libraries.
        flows.servers.ServerUnavailable: the Prefect server does not answer.
    """
    workspace, recipe = run.workspace, run.record.recipe
    store = Store(workspace.store)
    steps = plan(recipe, store, read_runs(workspace))
    heading = f"{recipe.recipe} · run {run.record.run_id}"
    show_plan(screen.console, steps, heading=heading, warnings=warnings(recipe), chosen=chosen)
    if strict:
        refuse_drift(steps)
    with Ledger(None, workspace.root, recipe.recipe) as ledger:
        life = StageLife(run, store=store, ledger=ledger, watcher=screen, stage_function=stage_function)
        life.begin()
        try:
            with screen.live():
                if needs_work(steps):
                    in_store = {step.name for step in steps if step.action == "reuse"}
                    _order(life, in_store, verbose=verbose)
                else:
                    _verify(life)
        finally:
            life.end()
        for step, stage in run.record.stages.items():
            screen.samples(stage.samples, heading=samples_heading(run.record, step))
        show_end(
            screen.console,
            run.record,
            pages=_pages(run, ledger),
            models=model_folders(run.record, workspace.store),
            snippet=snippet_for(run.record, workspace.store),
            next_steps=after_closed_gates(run.record, workspace.root),
        )
    return run.record


def exit_code(record: RunRecord) -> int:
    """The code that the command line ends with: that of the first stage that failed, or the run's own."""
    if record.status == "failed":
        codes = [stage.exit_code for stage in record.stages.values() if stage.status == "failed"]
        return next((code for code in codes if code is not None), ExitCode.INTERNAL)
    return {
        "completed": ExitCode.OK,
        "gate_closed": ExitCode.GATE_CLOSED,
        "resumable": ExitCode.RESUME,
        "running": ExitCode.RESUME,
    }[record.status]


def _verify(life: StageLife) -> None:
    """Everything is in the store: check it again, judge it, record it. Neither Prefect nor a child is started."""
    for step in life.inputs:
        if obstacle := life.obstacle(step):
            life.block(step, obstacle)
        else:
            life.live(step)
    for publication in life.recipe.publish:
        publish(publication, life)


def _order(life: StageLife, in_store: Collection[str], *, verbose: bool) -> None:
    """Have Prefect order the stages."""
    _refuse_what_does_not_fit(life.recipe)
    with ordering(life.run.workspace.root, verbose=verbose) as url:
        from flows.pipeline import Place, pipeline

        life.watcher.say(f"  Prefect shows it at {url.removesuffix('/api')}", "dim")
        place = Place(this_machine(), in_store)
        asyncio.run(pipeline(life.run.record.run_id, life, place, return_state=True))  # type: ignore[arg-type]


@contextmanager
def ordering(workspace: Path, *, verbose: bool) -> Iterator[str]:
    """The URL of a Prefect server that answers, the fork server warm; both load side by side with Prefect itself.

    Raises:
        flows.servers.ServerUnavailable: none answers, or the one that did has stopped.
    """
    for name, value in (SETTINGS if verbose else {**SETTINGS, **QUIET}).items():
        os.environ.setdefault(name, value)
    warm_up()
    server = servers.start(workspace)
    try:
        import_module("flows.pipeline")  # takes a second, while the server starts
        url = server.wait_ready()
        try:
            yield url
        except Exception as error:
            if servers.is_healthy(url):
                raise
            raise servers.ServerUnavailable(
                f"the Prefect server at {url} has stopped answering; finished stages are kept, and running ones have "
                "saved their state: run the same command again"
            ) from error
    finally:
        server.stop()


def _refuse_what_does_not_fit(recipe: Recipe) -> None:
    """ValueError for a stage that asks for more GPUs than there are, before any other begins."""
    machine = this_machine()
    for name, stage in recipe.stages.items():
        try:
            machine.share_of(stage.resources)
        except ValueError as error:
            raise ValueError(f"stages.{name}.{error}") from None


def _pages(run: Run, ledger: Ledger) -> Mapping[str, str]:
    """Where to look further, by whose page it is."""
    workspace = run.workspace.root
    prefect = os.environ.get("PREFECT_API_URL", "").removesuffix("/api") or (
        f"PREFECT_HOME={shlex.quote(str(workspace / 'prefect'))} {program('prefect')} server start"
    )
    mlflow = ledger.where()
    if mlflow.startswith("mlflow "):
        mlflow = program("mlflow") + mlflow.removeprefix("mlflow")
    return {"MLflow": mlflow, "Prefect": prefect, "logs": str(run.folder / "logs")}
