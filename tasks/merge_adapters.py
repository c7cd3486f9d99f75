"""The implicit step that merges adapters into their base model before they are published."""

from vantage.models.folders import tokenizer_digest
from vantage.models.merging import merge
from vantage.schemas.recipe.work import MergePolicy, MergeRewardModel
from vantage.schemas.records.job import StageJob, StageResult


def run(job: StageJob[MergePolicy | MergeRewardModel]) -> StageResult:
    """Write the whole model; programs that serve it need no support for adapters."""
    merge(job.model("adapters"), job.output)
    return StageResult(metrics={}, tokenizer_digest=tokenizer_digest(job.output))
