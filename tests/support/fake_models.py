"""Compute fake stages whose artifacts MLflow takes for models: the two files that a description needs lie beside the weights.

SFT measures ``test_nll`` 0.5 too, which gates may read.
"""

from tests.support import fake_work
from vantage.schemas.records.job import StageJob, StageResult


def run_stage(job: StageJob) -> StageResult:
    """Make one attempt at any kind of work."""
    result = fake_work.run_stage(job)
    (job.output / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (job.output / "tokenizer_config.json").write_text("{}")
    more = {"test_nll": 0.5} if job.work.kind == "sft" else {}
    return result.model_copy(update={"metrics": {**result.metrics, **more}})
