"""Compute fake stages whose models are folders that can be published; a child process runs this module by name."""

import json

from tests.support import fake_work
from vantage.schemas.records.job import StageJob, StageResult


def run_stage(job: StageJob) -> StageResult:
    """Run a stage as ``fake_work`` does, with the files that a registered model needs."""
    result = fake_work.run_stage(job)
    if job.work.kind in ("import_model", "sft", "reward_model", "policy_optimization"):
        reward = job.work.kind == "reward_model"
        architecture = "LlamaForSequenceClassification" if reward else "LlamaForCausalLM"
        (job.output / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (job.output / name).write_text("{}")
        weights = (job.output / fake_work.WEIGHTS).read_bytes()
        (job.output / "model.safetensors").write_bytes(weights * 100)
    if job.work.kind == "sft":
        return result.model_copy(update={"metrics": {**result.metrics, "test_nll": 0.5}})
    return result
