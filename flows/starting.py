"""Open a run that Prefect starts, from its form, a deployment or a schedule, as ``vantage run`` opens it."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from vantage.attempts.launchers.local_process import warm_up
from vantage.attempts.machine import check_resources
from vantage.flows.notifying import notified
from vantage.flows.open_runs import opened
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.pools.deployments import require_pools
from vantage.flows.publishing.announcing import moves_announced
from vantage.flows.shown_plan import planned
from vantage.flows.unsent_ledger import unsent_said
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.tracking import check_configured
from vantage.runs.console import Screen, open_console
from vantage.runs.planning import steps_in_store
from vantage.runs.resolving import ChosenRates, load_resolved, load_resolved_text
from vantage.runs.run import acquire_run, acquire_run_by_id
from vantage.runs.shown_warnings import warnings_shown
from vantage.runs.workspace import Workspace
from vantage.signing.before_runs import check_signing


def open_run(
    held: ExitStack,
    recipe: str,
    overrides: Sequence[str],
    workspace: str,
    run_id: str | None,
    *,
    strict: bool,
) -> Orchestrator:
    """Open the run, with the same plan and checks as on the command line; ``held`` closes it.

    Args:
        held: closes the run's lock and ledger.
        recipe: a recipe's file, the name of a built-in one, or a recipe's text; not read if ``run_id`` is given.
        overrides: ``KEY=VALUE``.
        workspace: the folder or bucket with runs, artifacts and ledger.
        run_id: id of the run to resume, with its recorded recipe; None: the newest unfinished run of the recipe, or a
            new one.
        strict: refuse to reuse artifacts that were made with other code or libraries.

    Raises:
        ValueError: the recipe is invalid, or a stage needs more than the machine has (``RunError``: about the run).
    """
    warm_up()
    where = Workspace.at(workspace)
    if run_id is not None:
        run = held.enter_context(acquire_run_by_id(where, run_id))
        chosen: ChosenRates = {}
    else:
        load = load_resolved_text if "\n" in recipe else load_resolved
        resolved, chosen = load(recipe, overrides, workspace=where)
        source = resolved.recipe if "\n" in recipe else recipe
        run = held.enter_context(acquire_run(where, resolved, source=source, overrides=overrides))
    check_signing(run.record.recipe, where)
    check_configured()
    check_resources(run.record.recipe)
    require_pools(run.record.recipe)
    screen = Screen(open_console(sys.stdout))
    steps = planned(run, screen, strict=strict, chosen=chosen)
    watcher = held.enter_context(notified(run, screen))
    held.enter_context(moves_announced(where, watcher))
    held.enter_context(warnings_shown(lambda text: watcher.say(f"  warning: {text}", "yellow")))
    ledger = held.enter_context(Ledger(None, where.root, run.record.recipe.recipe))
    orchestrator = Orchestrator(
        run,
        store=where.storage,
        ledger=ledger,
        watcher=watcher,
        in_store=steps_in_store(steps),
        makes_report=True,
    )
    held.enter_context(unsent_said(run, ledger, watcher))
    orchestrator.begin()
    held.callback(orchestrator.send_report)
    held.callback(orchestrator.end)
    return held.enter_context(opened(orchestrator))
