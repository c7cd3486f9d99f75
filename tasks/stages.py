"""From a job to the stage that does it, by the table of kinds."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from vantage.schemas.kinds import KINDS
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.training import compile_outcome, progress
from vantage.tasks.training.progress import Progress
from vantage.tasks.training.scratch import PROGRESS
from vantage.tasks.training.watched import read_watched
from vantage.tasks.training.writer import writes_files

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
        with _output_of_this_process(job) as own, compile_outcome.noting() as noted:
            result: StageResult = run(own)
    finally:
        progress.end()
    metrics = {**result.metrics, **compile_outcome.metrics_of(noted)}
    result = with_guards(job, result.model_copy(update={"metrics": metrics}))
    for name, value in result.metrics.items():
        log.info("%s: %s", name, "undefined" if value is None else f"{value:.6g}")
    if writes_files():  # another rank would look at files that the first is still renaming
        files = [path for path in job.output.rglob("*") if path.is_file()]
        log.info("made %d files, %.1f MB", len(files), sum(path.stat().st_size for path in files) / 1e6)
    return result


def with_guards(job: StageJob, result: StageResult) -> StageResult:
    """Return the result with what the guards of the attempt have seen."""
    watched = read_watched(job.scratch)
    return result.model_copy(update={"firings": watched.firings, "ended_early": watched.ended_early})


@contextmanager
def _output_of_this_process(job: StageJob) -> Iterator[StageJob]:
    """Yield the job as it is; in a process that writes no files, with an output folder that is thrown away.

    All ranks have to take part in gathering sharded weights, so all of them save; one folder becomes the artifact.
    """
    if writes_files():
        yield job
        return
    with TemporaryDirectory(prefix="vantage-output-") as folder:
        yield job.model_copy(update={"output": Path(folder)})
