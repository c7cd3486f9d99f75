"""``precision``, also ``auto``, works in stages that only measure or collect."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.test_sampled_rows import job_of
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.records.job import StageResult
from vantage.schemas.records.stage_key import dumped
from vantage.tasks.stages import run_stage

pytestmark = pytest.mark.slow

MEASURE = ("evaluation", "pairs")


def numbers(result: Any) -> dict[str, Any]:
    return {name: value for name, value in result.metrics.items() if "seconds" not in name}


@pytest.mark.parametrize("name", MEASURE)
def test_a_stage_that_measures_computes_as_in_autocast(name: str, pipeline: Any, few_prompts: Path) -> None:
    """The stage gives the same bits as with PyTorch's own context around it in float32, and others than without."""

    def result(**changes: Any) -> StageResult:
        job = job_of(name, pipeline, Sampling(), **changes)
        return run_stage(job.model_copy(update={"inputs": job.inputs | {"prompts": few_prompts}}))

    whole, rounded = result(), result(precision="bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = result()
    assert numbers(rounded) == numbers(expected) != numbers(whole)
    assert not torch.is_autocast_enabled("cpu")


def test_auto_is_decided_by_the_recipe(pipeline: Any) -> None:
    """``gpus`` of 1 or more is bfloat16. Without the field it is float32, whatever the machine has. The key has the type."""
    for gpus, arithmetic in ((None, "float32"), (0, "float32"), (1, "bfloat16"), (8, "bfloat16")):
        for name in ("policy", "evaluation"):
            work = pipeline.job(name, precision="auto", resources=Resources(gpus=gpus)).work
            assert work.arithmetic == arithmetic
            written = pipeline.job(name, precision=arithmetic, resources=Resources(gpus=gpus)).work
            assert dumped(work) == dumped(written)
    plain = pipeline.job("evaluation").work
    assert "precision" not in dumped(plain), "as before the field was there"


def test_a_policy_trains_in_the_arithmetic_of_auto(pipeline: Any) -> None:
    resources, few = Resources(gpus=1), {"iterations": 1, "validation_samples": 4, "test_samples": 4}
    automatic, written, plain = (
        numbers(run_stage(pipeline.job("policy", **few, precision=precision, resources=resources)))
        for precision in ("auto", "bfloat16", "float32")
    )
    assert automatic == written != plain
