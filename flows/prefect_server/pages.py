"""Artifacts on Prefect's pages: progress of a running stage, the gates' verdicts, and links to MLflow and the report.

Errors here do not stop a stage: a dead server is noticed when the stage's state is set.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import UUID

from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from vantage.ledger.page_links import linked
from vantage.ledger.run_ledger import Ledger
from vantage.review.reports.files import REPORT
from vantage.runs.record import RunRecord
from vantage.schemas.safe_text import markdown_text
from vantage.tasks.training.progress import StageProgress

SECONDS_BETWEEN_UPDATES = 3.0
TIMEOUT_SECONDS = 10.0
"""Seconds for pages: Prefect's client would try for minutes to reach a dead server."""

log = logging.getLogger(__name__)


class ProgressPage:
    """The progress bar on a stage's page."""

    def __init__(self, step: str, read_report: Callable[[], StageProgress | None]) -> None:
        self.is_complete = False
        """Whether the stage has made its artifact; must be set before the block ends."""
        self._step = step
        self._read_report = read_report
        self._page: UUID | None = None

    async def watch(self) -> None:
        """Move the bar until cancelled."""
        try:
            while True:
                await asyncio.sleep(SECONDS_BETWEEN_UPDATES)
                report = self._read_report()
                if report is not None and report.total:
                    await self._show(100.0 * report.step / report.total)
        except Exception:  # a page of Prefect must not stop a run
            log.debug("no progress page for %s", self._step, exc_info=True)

    async def finish(self) -> None:
        """Fill the bar of a stage that is complete; there is none if the stage was short."""
        if self._page is None or not self.is_complete:
            return
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._show(100.0)
        except Exception:
            log.debug("the progress page of %s stays as it is", self._step, exc_info=True)

    async def _show(self, percent: float) -> None:
        if self._page is None:
            key = f"progress-{_as_key(self._step)}"
            self._page = await acreate_progress_artifact(percent, key=key, description=self._step)
        else:
            await aupdate_progress_artifact(self._page, percent)


@asynccontextmanager
async def progress_page(
    step: str, read_report: Callable[[], StageProgress | None]
) -> AsyncIterator[ProgressPage]:
    """Yield a progress bar on the stage's page for the body of the ``async with``; ``read_report`` returns the progress."""
    page = ProgressPage(step, read_report)
    watching = asyncio.create_task(page.watch())
    try:
        yield page
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await page.finish()


async def show_run(record: RunRecord, *, ledger: Ledger, has_report: bool) -> None:
    """Create tables of the gates' verdicts and of all stages, and links to the pages in MLflow and to the report."""
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
    gates = gate_rows(record)
    links = links_of(record, ledger, has_report=has_report)
    subject = f"run {record.run_id}"
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            if gates:
                await acreate_table_artifact(gates, key="gates", description=f"Gates of {subject}")
            await acreate_table_artifact(stages, key="stages", description=f"Stages of {subject}")
            await acreate_markdown_artifact(links, key="links", description=f"MLflow and report of {subject}")
    except Exception:  # a page of Prefect must not stop a run
        log.debug("no pages for run %s", record.run_id, exc_info=True)


def gate_rows(record: RunRecord) -> list[dict[str, object]]:
    """Return one row per gate: measured value, number of prompts, condition, and consequence."""
    return [
        {
            "stage": name,
            "metric": verdict.metric,
            "measured": verdict.measured,
            "interval": "" if verdict.interval is None else "{:.4g} to {:.4g}".format(*verdict.interval),
            "prompts": verdict.n,
            # in words: Prefect's tables leave out ">"
            "rule": f"{'at least' if verdict.relation == '>=' else 'at most'} {verdict.threshold:g}",
            "verdict": "passed" if verdict.passed else "CLOSED",
            "if closed": verdict.on_fail,
            "remark": "; ".join(each for each in (verdict.reason, verdict.warning) if each),
        }
        for name, stage in record.stages.items()
        for verdict in stage.verdicts
    ]


def links_of(record: RunRecord, ledger: Ledger, *, has_report: bool) -> str:
    """Return Markdown with the pages of the run, of its stages and of its models in MLflow, and the commands that check it."""
    where = ledger.where()
    lines = [f"Recipe **{markdown_text(record.recipe.recipe)}**, run `{record.run_id}`", ""]
    if where.startswith("http"):
        lines.append(f"- MLflow: [the run]({where})")
        if all_runs := ledger.where_all():
            lines.append(f"- Compare: [all runs of this recipe]({all_runs})")
        if has_report:
            report = ledger.where(artifact=REPORT)
            lines.append(f"- Report: [{REPORT}]({report}) (made when the run ends)")
        lines += [f"- Registered model: [{name}]({ledger.model_page(name)})" for name in record.copies]
    else:
        lines.append(f"- MLflow: `{where}`, then the run {record.run_id}")
        lines += [f"- Registered model: `{name}`" for name in record.copies]
        if has_report:
            lines.append(f"- Report: `vantage report {record.run_id} --open`")
    lines += [
        f"- Check it back to the data: `vantage audit {record.run_id}`",
        "",
        "| stage | status | attempt | gates |",
        "|---|---|---|---|",
    ]
    for name, stage in record.stages.items():
        page = ledger.where(name) if where.startswith("http") else None
        gates = "<br>".join(markdown_text(str(verdict)) for verdict in stage.verdicts)
        status = stage.status.replace("_", " ")
        lines.append(f"| {linked(name, page)} | {status} | {stage.attempt or ''} | {gates} |")
    return "\n".join(lines)


def _as_key(step: str) -> str:
    """Return the text as one of Prefect's keys, which have lower-case letters, digits and dashes only."""
    return step.replace(".", "-").replace("_", "-")
