"""Make runs whose stages keep the answers that they were given."""

from pathlib import Path

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import RUN_STAGE
from vantage.storage.refs import Ref
from vantage.tasks.rewards import answer_file
from vantage.tasks.training.answer_record import answer_metrics


def go(workspace: Workspace, recipe: Path, *, until: str | None = None) -> RunRecord:
    """Run the recipe as ``vantage run`` does, in a process that knows no answers yet."""
    answer_file._opened.cache_clear()
    answer_metrics()
    with orchestrated(
        workspace, recipe, in_process=True, stage_function=RUN_STAGE, makes_report=False
    ) as orchestrator:
        attempt_all(orchestrator, until=until)
        if until is None:
            orchestrator.end()
    return read_runs(workspace)[0]


def ref_of(workspace: Workspace, record: RunRecord, stage: str) -> Ref:
    """Return the ref of what a stage of the run has made."""
    key = record.stages[stage].stage_key
    assert key is not None
    ref = workspace.storage.find(key)
    assert ref is not None
    return ref
