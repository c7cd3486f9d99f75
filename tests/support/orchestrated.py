"""Run fake stages without Prefect, for the tests of several modules."""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from vantage.attempts.jobs import resources_of
from vantage.attempts.launchers import stage_process
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.launchers.local_process import attempt_folder
from vantage.attempts.machine import Machine, available_cpus
from vantage.flows.notifying import notified
from vantage.flows.orchestrator import Orchestrator
from vantage.ledger.run_ledger import Ledger
from vantage.runs.record import StageRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import RUN_STAGE, Share
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.training.progress import StageProgress


class Witness:
    """Remembers what was reported to it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.seen: list[tuple[str, int]] = []

    def say(self, text: str, style: str = "") -> None:
        self.lines.append(text)

    def started(self, step: str, attempt: int) -> None:
        self.lines.append(f"{step} started {attempt}")

    def progressed(self, step: str, report: StageProgress) -> None:
        self.seen.append((step, report.step))

    def ended(self, step: str, stage: StageRecord) -> None:
        self.lines.append(f"{step} {stage.status}")


class InProcess:
    """Computes stages in the process of the test, for tests that look at what is recorded and not at processes.

    A stage leaves the files that its process would leave, and an error becomes the failure that its process would report.
    """

    def launch(self, job: StageJob, *, log: Path, function: str = RUN_STAGE, **_: Any) -> StageResult:
        """Run one attempt at a stage."""
        job_file = attempt_folder(job) / "job.json"
        for folder in (job_file.parent, log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        stage_process.write_atomically(job_file, job.model_dump_json(indent=2))
        with log.open("a") as output, redirect_stdout(output), redirect_stderr(output):
            try:
                stage_process.compute(job_file, function)
            except Exception as error:
                traceback.print_exception(error)
                raise StageFailed(stage_process.explain(error), log=log) from error
        return StageResult.model_validate_json(job_file.with_name("result.json").read_bytes())


@contextmanager
def orchestrated(
    workspace: Workspace,
    recipe: Path,
    *overrides: str,
    stage_function: str = "tests.support.fake_work.run_stage",
    makes_report: bool = True,
    in_process: bool = False,
) -> Iterator[Orchestrator]:
    """Open a run of the recipe as ``vantage run`` does.

    Args:
        in_process: its stages are computed in this process, a second sooner than by a child each.
    """
    resolved, _ = load_resolved(str(recipe), overrides)
    with (
        acquire_run(workspace, resolved, source=str(recipe)) as run,
        notified(run, Witness()) as watcher,
    ):
        ledger = Ledger(None, workspace.root, resolved.recipe)
        orchestrator = Orchestrator(
            run,
            store=workspace.storage,
            ledger=ledger,
            watcher=watcher,
            stage_function=stage_function,
            makes_report=makes_report,
        )
        if in_process:
            orchestrator._launcher = InProcess()
        orchestrator.begin()
        yield orchestrator


def attempt(
    orchestrator: Orchestrator, step: str, share: Share | None = None, *, only_reuse: bool = False
) -> StageRecord:
    """Make one attempt at the step, from its request to its record."""
    request = orchestrator.request(step, share, only_reuse=only_reuse)
    return orchestrator.run.record.stages[step] if request is None else orchestrator.attempt(request)


def attempt_all(orchestrator: Orchestrator, *, until: str | None = None) -> dict[str, StageRecord]:
    """Attempt every step in order, as a run that has nothing to compute does, up to and without ``until``."""
    return _attempt_steps(orchestrator, takewhile(lambda step: step != until, orchestrator.inputs))


def attempt_rest(orchestrator: Orchestrator, begin: str) -> dict[str, StageRecord]:
    """Attempt the steps from ``begin`` on, after ``attempt_all(until=begin)``."""
    return _attempt_steps(orchestrator, dropwhile(lambda step: step != begin, orchestrator.inputs))


def _attempt_steps(orchestrator: Orchestrator, steps: Iterable[str]) -> dict[str, StageRecord]:
    for step in steps:
        obstacle = orchestrator.obstacle(step)
        if obstacle:
            orchestrator.block(step, obstacle)
        else:
            cpus, _ = Machine(cpus=available_cpus()).share_of(resources_of(orchestrator.recipe, step))
            attempt(orchestrator, step, Share(cpus=cpus))
            while orchestrator.extends(step):
                attempt(orchestrator, step, Share(cpus=cpus))
    return orchestrator.run.record.stages


def events(workspace: Workspace) -> list[str]:
    """Return the computations that there were, as ``fake_work`` recorded them."""
    path = workspace.root / "events.txt"
    return path.read_text().splitlines() if path.exists() else []


def pace(workspace: Workspace, seconds: float) -> None:
    """Set how long a step of a fake stage takes from now on."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    (workspace.root / "seconds.txt").write_text(str(seconds))
