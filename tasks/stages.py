"""From a job to the stage that does it, by the table of kinds."""

import logging
from importlib import import_module

from schemas.kinds import KINDS
from schemas.records.job import StageJob, StageResult
from tasks.training import progress
from tasks.training.progress import Progress
from tasks.training.scratch import PROGRESS

log = logging.getLogger(__name__)


def run_stage(job: StageJob) -> StageResult:
    """Do one attempt at a stage in this process; its files lie in ``job.output`` afterwards.

    Modules are imported on demand, so that preparing data loads no tensor library and training no pandera.
    """
    job.scratch.mkdir(parents=True, exist_ok=True)
    Progress(job.scratch / PROGRESS, total=0, phase="loading")
    log.info("%s (%s), attempt %d, seed %d", job.name, job.work.kind, job.attempt, job.seed)
    run = import_module(KINDS[job.work.kind].module).run
    try:
        result: StageResult = run(job)
    finally:
        progress.end()
    for name, value in result.metrics.items():
        log.info("%s: %s", name, "undefined" if value is None else f"{value:.6g}")
    files = [path for path in job.output.rglob("*") if path.is_file()]
    log.info("made %d files, %.1f MB", len(files), sum(path.stat().st_size for path in files) / 1e6)
    return result
