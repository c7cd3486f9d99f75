"""Fake stages whose artifacts MLflow takes for models: the two files that a description needs lie beside the weights."""

from schemas.records.job import StageJob, StageResult
from tests.flows import fake_work


def run_stage(job: StageJob) -> StageResult:
    """One attempt at any kind of work."""
    result = fake_work.run_stage(job)
    (job.output / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (job.output / "tokenizer_config.json").write_text("{}")
    return result
