"""A worker process of ``schedule_many.py``: it runs whole pipelines as coroutines, with stages that sleep.

Real: Prefect's worker (polling, slots of the work pool and of the worker, states), our flow ``vantage.flows.pipeline.pipeline``
with its orchestrator, retries, run records and store, one workspace a pipeline. Made up: a stage sleeps in a thread in
place of a process that computes, many pipelines share one process (which describes its code once), and nothing is sent
to MLflow.
"""

import asyncio
import hashlib
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio.abc
import psycopg
from prefect.client.schemas.objects import FlowRun
from prefect.events.worker import EventsWorker
from prefect.flow_engine import run_flow_async
from prefect.workers.base import BaseJobConfiguration, BaseWorker, BaseWorkerResult

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.machine import Machine
from vantage.flows.open_runs import opened
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.pipeline import pipeline
from vantage.ledger.run_ledger import Ledger
from vantage.runs.record import StageRecord
from vantage.runs.resolving import load_resolved_text
from vantage.runs.run import acquire_run
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import RUN_STAGE, Failure, Share
from vantage.schemas.records.job import StageJob, StageResult
from vantage.storage.store import Store
from vantage.tasks.training.progress import Progress, StageProgress
from vantage.tasks.training.scratch import PROGRESS

POOL = "simulation"
POOL_TYPE = "coroutine"
THREADS_PER_PIPELINE = 8
STEPS = 4
"""Progress reports of a stage."""


class Table:
    """The table in which every stage writes what it did. Each process has one connection to it."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._one_at_a_time = threading.Lock()

    def write(self, job: StageJob, pipeline_number: int, event: str) -> None:
        """Write ``started``, ``done`` or ``lost``, with the database's time."""
        with self._one_at_a_time:
            self._connection.execute(
                "INSERT INTO events (pipeline, stage, attempt, event, process) VALUES (%s, %s, %s, %s, %s)",
                (pipeline_number, job.name, job.attempt, event, os.getpid()),
            )


class SleepingLauncher:
    """A launcher whose stages sleep; a share of all first attempts is lost, and retried as a preempted one is."""

    def __init__(self, number: int, *, table: Table, seconds: float, lost: float) -> None:
        self._number = number
        self._table = table
        self._seconds = seconds
        self._lost = lost

    def launch(
        self,
        job: StageJob,
        *,
        log: Path,
        share: Share | None = None,
        stop: threading.Event | None = None,
        on_poll: Callable[[], None] | None = None,
        function: str = RUN_STAGE,
        hang_seconds: float | None = None,
    ) -> StageResult:
        """Sleep, report progress, and write the artifact's only file. Implicit steps do not sleep."""
        self._table.write(job, self._number, "started")
        is_stage = job.work.kind not in ("import_model", "prepare_data")
        chance = random.Random(f"{job.stage_key} {job.attempt}")
        progress = Progress(job.scratch / PROGRESS, total=STEPS, phase="sleeping")
        for step in range(STEPS if is_stage else 0):
            time.sleep(self._seconds * chance.uniform(0.5, 1.5) / STEPS)
            progress.update(step + 1)
            if on_poll is not None:
                on_poll()
        progress.close()
        if is_stage and job.attempt == 1 and chance.random() < self._lost:
            self._table.write(job, self._number, "lost")
            failure = Failure(
                exit_code=ExitCode.RESUME, cause="preempted", message="preempted", remedy="resumes"
            )
            raise StageFailed(failure, log=log)
        (job.output / "slept.txt").write_text(job.stage_key)
        self._table.write(job, self._number, "done")
        return StageResult(metrics={}, tokenizer_digest=hashlib.sha256(b"tokenizer").hexdigest())


class Silent:
    """A watcher that shows nothing."""

    def say(self, text: str, style: str = "") -> None: ...
    def started(self, step: str, attempt: int) -> None: ...
    def progressed(self, step: str, report: StageProgress) -> None: ...
    def ended(self, step: str, stage: StageRecord) -> None: ...


class UnsentLedger(Ledger):
    """Writes its records to the run's folder, as always, and sends none of them to MLflow."""

    def __init__(self, workspace: Path, experiment: str) -> None:
        super().__init__(None, workspace, experiment)
        self._sender.notify = lambda outbox, *, can_wait=False: None  # type: ignore[method-assign]
        self._sender.flush = lambda timeout_seconds: True  # type: ignore[method-assign]


class Counted(logging.Handler):
    """Counts the requests that this process's HTTP clients log."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += 1


class CoroutineWorker(BaseWorker[BaseJobConfiguration, Any, BaseWorkerResult]):
    """Prefect's worker, which runs each flow run in this process."""

    type = POOL_TYPE
    job_configuration = BaseJobConfiguration
    table: Table
    seconds: float
    lost: float

    async def run(
        self,
        flow_run: FlowRun,
        configuration: BaseJobConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> BaseWorkerResult:
        """Return the flow run, from its JSON parameters, in a run that is opened as ``vantage.flows.starting`` opens it."""
        if task_status is not None:
            task_status.started(os.getpid())
        with ExitStack() as held:
            orchestrator = await asyncio.to_thread(self._open, held, flow_run.parameters)
            parameters = {**flow_run.parameters, "run_id": orchestrator.run.record.run_id}
            await run_flow_async(pipeline, flow_run=flow_run, parameters=parameters, return_type="state")
        return BaseWorkerResult(status_code=0, identifier=str(flow_run.id))

    def _open(self, held: ExitStack, parameters: dict[str, Any]) -> Orchestrator:
        number = int(parameters["overrides"][0].partition("=")[2])
        where = Workspace(Path(parameters["workspace"]))
        resolved, _ = load_resolved_text(parameters["recipe"], parameters["overrides"])
        run = held.enter_context(acquire_run(where, resolved, source=resolved.recipe))
        orchestrator = Orchestrator(
            run,
            store=Store(where.store),
            ledger=held.enter_context(UnsentLedger(where.root, resolved.recipe)),
            watcher=Silent(),
            machine=Machine(cpus=1000),
            launcher=SleepingLauncher(number, table=self.table, seconds=self.seconds, lost=self.lost),
        )
        orchestrator.begin()
        held.callback(orchestrator.end)
        return held.enter_context(opened(orchestrator))


async def work(*, slots: int, seconds: float, lost: float) -> None:
    """Work until SIGTERM comes."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(slots * THREADS_PER_PIPELINE))
    worker = CoroutineWorker(
        work_pool_name=POOL, name=f"worker-{os.getpid()}", limit=slots, create_pool_if_not_found=False
    )
    worker.table, worker.seconds, worker.lost = Table(os.environ["SIMULATION_DATABASE"]), seconds, lost
    await worker.start()


def main() -> None:
    """Work as ``schedule_many_worker.py SLOTS SECONDS LOST REQUESTS_FILE`` asks."""
    slots, seconds, lost, requests = (
        int(sys.argv[1]),
        float(sys.argv[2]),
        float(sys.argv[3]),
        Path(sys.argv[4]),
    )
    counted = Counted()
    logger = logging.getLogger("httpx")
    logger.addHandler(counted)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def end(number: int, frame: object) -> None:
        EventsWorker.drain_all(timeout=60.0)  # send the states of task runs
        requests.write_text(str(counted.number))
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    # In a thread, since several pipelines would take turns at the main thread's signal handlers.
    thread = threading.Thread(
        target=lambda: asyncio.run(work(slots=slots, seconds=seconds, lost=lost)), daemon=True
    )
    thread.start()
    while thread.is_alive():
        thread.join(1.0)
    sys.exit("the worker ended")


if __name__ == "__main__":
    main()
