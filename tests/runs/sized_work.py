"""Compute fake stages whose models have the configuration of the quickstart's model."""

import json

from tests.support import fake_work
from vantage.models.model_config import BUILTIN_CONFIGS
from vantage.schemas.records.job import StageJob, StageResult


def run_stage(job: StageJob) -> StageResult:
    """Compute as ``fake_work``, and write ``config.json`` beside the weights of a policy."""
    result = fake_work.run_stage(job)
    if job.work.kind in ("import_model", "sft"):
        (job.output / "config.json").write_text(json.dumps(BUILTIN_CONFIGS["nano"]))
    return result
