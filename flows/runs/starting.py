"""A run that Prefect starts, from its form, a deployment or a schedule: opened as ``vantage run`` opens it."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from flows.commands.console import Screen, open_console
from flows.launchers.local_process import warm_up
from flows.machine import refuse_what_does_not_fit
from flows.open_runs import opened
from flows.orchestrator import Orchestrator
from flows.runs.execution import planned
from flows.runs.planning import in_store
from flows.runs.resolving import ChosenRates, load_resolved, load_resolved_text
from flows.runs.run import Workspace, drive, drive_again
from ledger.run_ledger import Ledger
from storage.store import Store


def open_run(
    held: ExitStack,
    recipe: str,
    overrides: Sequence[str],
    workspace: Path,
    run_id: str | None,
    *,
    strict: bool,
) -> Orchestrator:
    """Open the run, planned and refused as on the command line; ``held`` closes it.

    Args:
        held: what the run's locks and ledger end with.
        recipe: a recipe's file, the name of a built-in one, or a recipe's text; not read where ``run_id`` is given.
        overrides: ``KEY=VALUE``.
        workspace: the folder that holds runs, artifacts and ledger.
        run_id: of the run to go on with, as it was resolved then; None: the newest unfinished one of the recipe, or a
            new one.
        strict: refuse to reuse what was made with other code or libraries.

    Raises:
        ValueError: the recipe is refused, or a stage asks for more than the machine has (``RunError``: the run).
    """
    warm_up()
    where = Workspace(workspace)
    if run_id is not None:
        run = held.enter_context(drive_again(where, run_id))
        chosen: ChosenRates = {}
    else:
        load = load_resolved_text if "\n" in recipe else load_resolved
        resolved, chosen = load(recipe, overrides)
        source = resolved.recipe if "\n" in recipe else recipe
        run = held.enter_context(drive(where, resolved, source=source, overrides=overrides))
    refuse_what_does_not_fit(run.record.recipe)
    screen = Screen(open_console(sys.stdout))
    steps = planned(run, screen, strict=strict, chosen=chosen)
    ledger = held.enter_context(Ledger(None, where.root, run.record.recipe.recipe))
    orchestrator = Orchestrator(
        run,
        store=Store(where.store),
        ledger=ledger,
        watcher=screen,
        in_store=in_store(steps),
    )
    orchestrator.begin()
    held.callback(orchestrator.end)
    return held.enter_context(opened(orchestrator))
