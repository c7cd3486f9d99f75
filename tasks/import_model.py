"""The implicit first step: the recipe's model, checked and copied into a plain Hugging Face folder."""

from models.folders import tokenizer_digest
from models.sources import import_model
from schemas.job import ImportModel, StageJob, StageResult


def run(job: StageJob) -> StageResult:
    """Import ``model.source``, so that nothing later depends on where it came from."""
    assert isinstance(job.work, ImportModel)
    import_model(
        job.work.model.source,
        job.output,
        seed=job.seed,
        planned=job.source_sha256,
        scratch=job.scratch,
    )
    return StageResult(metrics={}, tokenizer_digest=tokenizer_digest(job.output))
