"""`vantage sweep`: one run for every arm and seed, in one workspace, so that shared steps are computed once.

The same command resumes an interrupted sweep: finished runs are only checked.
"""

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path

from vantage.attempts.machine import Machine, this_machine
from vantage.attempts.stopping import first_error, remember_hangup, stop_signals
from vantage.flows.execution import ordering, started
from vantage.flows.prefect_server.proxies import check_proxies
from vantage.flows.sweeps.runs import SweepResult, SweepRuns, finished_run
from vantage.ledger.tracking import check_configured
from vantage.runs.console import Screen
from vantage.runs.pinning import pinned
from vantage.runs.planning import check_drift, needs_work, plan
from vantage.runs.resolving import resolve_sweep
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.attempt import RUN_STAGE
from vantage.schemas.steps import dependencies, pool_of
from vantage.schemas.sweep import Cell, SweepPlan, with_downstream
from vantage.storage.durable_files import make_folder


class SweepError(ValueError):
    """A sweep that cannot run now; the message contains the reason and the remedy."""


def run_sweep(
    written: SweepPlan,
    workspace: Workspace,
    screen: Screen,
    *,
    source: str,
    strict: bool = False,
    verbose: bool = False,
    stage_function: str = RUN_STAGE,
) -> SweepResult:
    """Run the missing cells of a sweep, and compare its arms.

    Raises:
        SweepError: another process executes the same sweep.
        vantage.runs.planning.DriftError: ``strict``, and an artifact to reuse was made with other code or libraries.
        vantage.flows.prefect_server.server.ServerUnavailable: the Prefect server does not answer.
    """
    check_configured()
    check_proxies(elsewhere=workspace.uri is not None)
    resolved = resolve_sweep(written, workspace)
    # once for the whole sweep, so that all runs compare with the same version
    recipes = {arm: pinned(recipe, workspace) for arm, recipe in resolved.recipes.items()}
    swept = SweepPlan(resolved.sweep, recipes)
    machine, cells, store = this_machine(), swept.cells(), workspace.storage
    at_once = cells_at_once(machine, swept)
    sweep_id = f"{swept.sweep.sweep}-{swept.digest[:6]}"
    with _sweep_lock(workspace.root / "sweeps" / sweep_id) as folder:
        _print_warnings(screen, swept)
        runs = read_runs(workspace)
        plans = [plan(cell.recipe, store, runs) for cell in cells]
        for steps in plans if strict else ():
            check_drift(steps)
        waiting = [cell for cell, steps in zip(cells, plans, strict=True) if needs_work(steps)]
        screen.say(
            f"{sweep_id}: {len(swept.recipes)} arms × {len(swept.sweep.seeds)} seeds = {len(cells)} runs, "
            f"{len(cells) - len(waiting)} done, up to {at_once} at once",
            "bold",
        )
        sweep_runs = SweepRuns(
            swept,
            workspace=workspace,
            store=store,
            screen=screen,
            folder=folder,
            source=source,
            stage_function=stage_function,
        )
        for cell, steps in zip(cells, plans, strict=True):
            if not needs_work(steps):
                sweep_runs.keep(cell, finished_run(cell, steps, runs) or sweep_runs.verify(cell))
        if waiting:
            try:
                with screen.live():
                    _order(waiting, sweep_runs, machine, at_once, verbose=verbose)
            except BaseException:
                sweep_runs.interrupted()
                raise
        return sweep_runs.end()


def cells_at_once(machine: Machine, swept: SweepPlan[ResolvedRecipe]) -> int:
    """Return the number of runs for which the machine can execute the smallest stage that depends on a seed.

    Raises:
        ValueError: a stage needs more GPUs than the machine has.
    """
    room = 1
    for arm, recipe in swept.recipes.items():
        differing = with_downstream(recipe, swept.sweep.reseeds)
        for name, stage in recipe.stages.items():
            if pool_of(recipe, name) is not None:
                continue
            try:
                cpus, gpus = machine.share_of(stage.resources)
            except ValueError as error:
                raise ValueError(f"arm {arm}: stages.{name}.{error}") from None
            if name in differing:
                room = max(
                    room, min(machine.cpus // cpus, len(machine.gpus) // gpus if gpus else machine.cpus)
                )
    return room


def _order(
    waiting: Sequence[Cell[ResolvedRecipe]],
    sweep_runs: SweepRuns,
    machine: Machine,
    at_once: int,
    *,
    verbose: bool,
) -> None:
    """Run the cells with Prefect, with one Prefect server and one fork server."""
    with started(sweep_runs.workspace.root, verbose=verbose) as server, ordering(server) as url:
        from vantage.flows.sweeps.cells import run_cells

        sweep_runs.screen.say(f"  Prefect shows them at {url.removesuffix('/api')}", "dim")
        reseeds = sweep_runs.swept.sweep.reseeds
        cells = run_cells(
            waiting,
            sweep_runs.run_cell,
            machine=machine,
            at_once=at_once,
            shared=lambda cell: set(dependencies(cell.recipe)) - with_downstream(cell.recipe, reseeds),
        )
        with _signals_to(sweep_runs.request_stop), ThreadPoolExecutor(1) as thread, first_error():
            thread.submit(copy_context().run, asyncio.run, cells).result()


@contextmanager
def _signals_to(request_stop: Callable[[], None]) -> Iterator[None]:
    """Request a stop on SIGINT, SIGTERM and SIGHUP while this thread waits for the thread that runs Prefect's flows.

    In the main thread, every flow would install its own handler of SIGTERM.
    """
    hung_up = False

    def stop(number: int, _: object) -> None:
        nonlocal hung_up
        if number == signal.SIGHUP:
            hung_up = True
            remember_hangup()
        request_stop()

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if not (hung_up and number == signal.SIGHUP):
                signal.signal(number, handler)


@contextmanager
def _sweep_lock(folder: Path) -> Iterator[Path]:
    """Yield the sweep's folder, locked for this process."""
    make_folder(folder)
    lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SweepError(
                f"sweep {folder.name} is being driven by another process; `vantage status` shows how far its runs are"
            ) from None
        yield folder
    finally:
        os.close(lock)


def _print_warnings(screen: Screen, swept: SweepPlan[ResolvedRecipe]) -> None:
    """Print every warning once, with its arms."""
    arms: dict[str, list[str]] = {}
    for arm, recipe in swept.recipes.items():
        for warning in warnings(recipe, dependencies(recipe)):
            arms.setdefault(warning, []).append(arm)
    for warning, arms_concerned in arms.items():
        said = "" if len(arms_concerned) == len(swept.recipes) else f" ({', '.join(arms_concerned)})"
        screen.say(f"warning{said}: {warning}", "yellow")
