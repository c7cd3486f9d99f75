"""Artifacts on Prefect's pages: progress of a running stage, the gates' verdicts, and the address of MLflow.

Errors here do not stop a stage: a dead server is noticed when the stage's state is set.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prefect.artifacts import (
    acreate_link_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from flows.runs.record import RunRecord
from tasks.training.progress import StageProgress

SECONDS_BETWEEN_UPDATES = 3.0
TIMEOUT_SECONDS = 10.0
"""Time limit for pages: Prefect's client would try for minutes to reach a dead server."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def progress_page(step: str, read_report: Callable[[], StageProgress | None]) -> AsyncIterator[None]:
    """A progress bar on the stage's page for the body of the ``async with``; ``read_report`` gives the progress."""
    page = asyncio.create_task(_show_progress(step, read_report))
    try:
        yield
    finally:
        page.cancel()
        await asyncio.wait([page])


async def _show_progress(step: str, read_report: Callable[[], StageProgress | None]) -> None:
    try:
        page = None
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_UPDATES)
            report = read_report()
            if report is None or not report.total:
                continue
            percent = 100.0 * report.step / report.total
            if page is None:
                page = await acreate_progress_artifact(
                    percent, key=f"progress-{_as_key(step)}", description=step
                )
            else:
                await aupdate_progress_artifact(page, percent)
    except Exception:  # a page of Prefect must not stop a run
        log.debug("no progress page for %s", step, exc_info=True)


async def show_run(record: RunRecord, *, mlflow: str) -> None:
    """Create tables of the gates' verdicts and of all stages, and a link to MLflow."""
    verdicts = [
        {
            "stage": name,
            "metric": verdict.metric,
            "measured": verdict.measured,
            "rule": f"{verdict.relation} {verdict.threshold:g}",
            "verdict": "passed" if verdict.passed else "CLOSED",
        }
        for name, stage in record.stages.items()
        for verdict in stage.verdicts
    ]
    stages = [
        {
            "stage": name,
            "status": stage.status,
            "attempt": stage.attempt,
            "digest": (stage.digest or "")[:12],
            "seconds": round(stage.seconds, 1),
        }
        for name, stage in record.stages.items()
    ]
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            if verdicts:
                await acreate_table_artifact(
                    verdicts, key="gates", description=f"Gates of run {record.run_id}"
                )
            await acreate_table_artifact(stages, key="stages", description=f"Stages of run {record.run_id}")
            if mlflow.startswith("http"):
                await acreate_link_artifact(mlflow, link_text="MLflow", key="mlflow")
            else:
                await acreate_markdown_artifact(f"The ledger: `{mlflow}`", key="mlflow")
    except Exception:  # a page of Prefect must not stop a run
        log.debug("no pages for run %s", record.run_id, exc_info=True)


def _as_key(step: str) -> str:
    """Prefect's keys have lower-case letters, digits and dashes only."""
    return step.replace(".", "-").replace("_", "-")
