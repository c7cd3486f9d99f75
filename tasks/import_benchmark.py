"""The implicit step that copies and checks the user's folder of lm-eval tasks."""

from vantage.schemas.recipe.work import ImportBenchmark
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.source_files import check_unchanged, digest_of_folder
from vantage.tasks.data.benchmark_tasks import check_tasks


def run(job: StageJob[ImportBenchmark]) -> StageResult:
    """Copy definitions, data and functions, so that nothing later depends on the original files.

    Raises:
        UnusableTasks: a definition reads something outside the folder.
        SourceChanged, SourceTooLarge: the folder has changed since the run was planned, or is too large.
    """
    benchmark = job.work.benchmark
    check_tasks(benchmark.origin.path)
    found = digest_of_folder(benchmark.origin.path, copy_to=job.output)
    check_unchanged(benchmark.source, planned=job.source_sha256, found=found)
    return StageResult(metrics={})
