"""``rollout.max_rows`` bounds how many responses are sampled side by side, whatever bounds the passes that train."""

from pathlib import Path
from typing import Any

import pytest

from vantage.models.sampling import Samples
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.rollout import Ahead, SampledAhead, Sampling
from vantage.schemas.recipe.stages import BestOfN
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.engine import LocalEngine
from vantage.tasks.stages import run_stage

pytestmark = pytest.mark.slow

KINDS = ("collected", "value", "policy", "evaluation", "best_of_n", "pairs")


def job_of(name: str, pipeline: Any, rollout: Any, **changes: Any) -> StageJob:
    """Return a stage of the tiny pipeline that samples, with short work."""
    changes = {"microbatch_size": 2, "rollout": rollout, **changes}
    if name in ("value", "policy"):
        return pipeline.job(name, iterations=1, **changes)
    if name in ("collected", "evaluation"):
        return pipeline.job(name, **changes)
    inputs = {"prompts": pipeline.folder("prompts"), "reward.main.0": pipeline.folder("reward")}
    work = (
        BestOfN(kind="best_of_n", init="sft", reward="main", prompts="prompts", iterations=1, batch_size=16,
                samples_per_prompt=4, minibatch_size=4, validation_samples=8, learning_rate=1e-4)
        if name == "best_of_n"
        else PreferenceCollection.model_validate(
            {"kind": "preference_collection", "policy": "sft", "prompts": "prompts", "judge": {"reward": "main"},
             "samples_per_prompt": 2, "batch_size": 16}
        )
    )  # fmt: skip
    role = "init" if name == "best_of_n" else "policy"
    job = pipeline.job("collected")
    return job.model_copy(
        update={
            "work": resolve_work(work.model_copy(update=changes)),
            "inputs": inputs | {role: pipeline.folder("sft")},
        }
    )


def rows_of_steps(job: StageJob, monkeypatch: pytest.MonkeyPatch) -> set[int | None]:
    """Return the bounds of rows with which the stage samples."""
    sample_own, seen = LocalEngine.sample_own, set()

    def spied(self: LocalEngine, *args: Any, **named: Any) -> Samples:
        seen.add(self.limits.rows)
        return sample_own(self, *args, **named)

    monkeypatch.setattr(LocalEngine, "sample_own", spied)
    run_stage(job)
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_that_samples_is_bounded_by_it_alone(
    name: str, pipeline: Any, few_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows_of(rollout: Sampling) -> set[int | None]:
        job = job_of(name, pipeline, rollout)
        return rows_of_steps(
            job.model_copy(update={"inputs": job.inputs | {"prompts": few_prompts}}), monkeypatch
        )

    rollout = {"value": SampledAhead, "policy": Ahead}.get(name, Sampling)
    assert rows_of(rollout(max_rows=5)) == {5}
    monkeypatch.undo()
    assert rows_of(rollout()) == {2}, "on a CPU microbatch_size, as before"
