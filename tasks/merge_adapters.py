"""The implicit step before a model is published that is only adapters: they are merged into the model beneath."""

from vantage.models.folders import tokenizer_digest
from vantage.models.merging import merge
from vantage.schemas.recipe.work import MergePolicy, MergeRewardModel
from vantage.schemas.records.job import StageJob, StageResult


def run(job: StageJob[MergePolicy | MergeRewardModel]) -> StageResult:
    """Write the whole model; what serves it needs to know nothing of adapters."""
    merge(job.model("adapters"), job.output)
    return StageResult(metrics={}, tokenizer_digest=tokenizer_digest(job.output))
