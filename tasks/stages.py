"""Run the stage that a job names, by the table of kinds."""

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.stage import Resources, Stage, Training
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.records.job import StageJob, StageResult
from vantage.storage.durable_files import make_folder
from vantage.tasks.training import compile_outcome, preemption, progress
from vantage.tasks.training.progress import Progress
from vantage.tasks.training.scratch import PROGRESS
from vantage.tasks.training.watched import read_watched
from vantage.tasks.training.writer import writes_files

log = logging.getLogger(__name__)


def run_stage(job: StageJob) -> StageResult:
    """Run one attempt at a stage in this process; its files are in ``job.output`` afterwards.

    Modules are imported on demand, so that preparing data loads no tensor library, and training does not load pandera.
    """
    make_folder(job.scratch)
    Progress(job.scratch / PROGRESS, total=0, phase="loading")
    log.info("%s (%s), attempt %d, seed %d", job.name, job.work.kind, job.attempt, job.seed)
    run = import_module(KINDS[job.work.kind].module).run
    try:
        with (
            _output_of_this_process(job) as own,
            compile_outcome.noting() as noted,
            preemption.within_time(*_time_of(job)),
            _arithmetic_of(job),
        ):
            result: StageResult = run(own)
    finally:
        progress.end()
    metrics = {**result.metrics, **compile_outcome.metrics_of(noted)}
    result = with_guards(job, result.model_copy(update={"metrics": metrics}))
    for name, value in result.metrics.items():
        log.info("%s: %s", name, "undefined" if value is None else f"{value:.6g}")
    if writes_files():  # another rank would read files that the first rank is still renaming
        files = [path for path in job.output.rglob("*") if path.is_file()]
        log.info("made %d files, %.1f MB", len(files), sum(path.stat().st_size for path in files) / 1e6)
    return result


def _arithmetic_of(job: StageJob) -> AbstractContextManager[object]:
    """Return the context for the computation of a stage that only measures or collects; training chooses for each
    network."""
    work = job.work
    if not isinstance(work, Stage) or isinstance(work, Training | RolloutCollection):
        return nullcontext()
    if work.arithmetic == "float32":  # checked first, since float32 needs no tensor library here
        return nullcontext()
    from vantage.tasks.training.optimization import autocast, training_device

    return autocast(work.arithmetic, training_device())


def _time_of(job: StageJob) -> tuple[float | None, str]:
    """Return the seconds that the recipe gives an attempt at the stage, and the name of the limit; None: unlimited."""
    resources = job.work.resources if isinstance(job.work, Stage) else Resources()
    limits = []
    if resources.max_seconds is not None:
        limits.append((resources.max_seconds, f"resources.max_seconds={resources.max_seconds:g}"))
    if resources.max_gpu_hours is not None and (gpus := _gpus()):
        seconds = 3600 * resources.max_gpu_hours / gpus
        limits.append((seconds, f"resources.max_gpu_hours={resources.max_gpu_hours:g} on {gpus} GPUs"))
    return min(limits, default=(None, ""))


def _gpus() -> int:
    """Return the number of GPUs that compute the stage: one for each of its processes, or none."""
    torch = sys.modules.get(
        "torch"
    )  # training has loaded torch already, and data preparation does not need it
    if torch is None or not torch.cuda.is_available():
        return 0
    from vantage.tasks.training import ranks

    return ranks.world_size()


def with_guards(job: StageJob, result: StageResult) -> StageResult:
    """Return the result with the observations of the attempt's guards."""
    watched = read_watched(job.scratch)
    return result.model_copy(update={"firings": watched.firings, "ended_early": watched.ended_early})


@contextmanager
def _output_of_this_process(job: StageJob) -> Iterator[StageJob]:
    """Yield the job; in a process that writes no files, its output folder is a temporary one.

    All ranks have to take part in gathering sharded weights, so all of them save; one folder becomes the artifact.
    """
    if writes_files():
        yield job
        return
    with TemporaryDirectory(prefix="vantage-output-") as folder:
        yield job.model_copy(update={"output": Path(folder)})
