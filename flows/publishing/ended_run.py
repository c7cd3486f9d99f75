"""A run that has ended, with everything that is needed to publish from it later."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vantage.flows.publishing.announcing import moves_announced
from vantage.ledger.run_ledger import Ledger
from vantage.runs.run import Run, hold_run
from vantage.runs.view import RunView
from vantage.runs.watching import Watcher
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.steps import dependencies
from vantage.storage.storage import Storage


@dataclass(frozen=True)
class EndedRun:
    """A run that this process holds without executing it (``vantage.flows.publishing.publishing.Published``)."""

    run: Run
    recipe: ResolvedRecipe
    inputs: Mapping[str, Mapping[str, str]]
    artifacts: Mapping[str, Artifact]
    """Step → the artifact that the run has recorded, if the store still has it; its files are not checked."""
    store: Storage
    ledger: Ledger
    watcher: Watcher


@contextmanager
def ended_run(workspace: Workspace, run_id: str, watcher: Watcher) -> Iterator[EndedRun]:
    """Hold the run and open its ledger; RunError if another process executes it."""
    with hold_run(workspace, run_id) as run:
        record = run.record
        with (
            moves_announced(workspace, watcher),
            Ledger(None, workspace.root, record.recipe.recipe) as ledger,
        ):
            recipe = record.recipe.model_dump(mode="json")
            ledger.attach(run_id, record.recipe.recipe, recipe, outcome=run.outcome())
            yield EndedRun(
                run=run,
                recipe=record.recipe,
                inputs=dependencies(record.recipe),
                artifacts=RunView.of(workspace, record).artifacts(),
                store=workspace.storage,
                ledger=ledger,
                watcher=watcher,
            )
