"""Stages whose policy and reward model are of two families store the same after a kill and on several ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.other_family import ByTransformers, train_other_reward
from vantage.ledger.journal import read
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def other(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained reward model of another family."""
    return train_other_reward(pipeline, tmp_path_factory.mktemp("family") / "base")


def scored_by(other: Path, job: StageJob, **inputs: Path) -> StageJob:
    return job.model_copy(update={"inputs": {**job.inputs, "reward.main.0": other, **inputs}})


def test_collected_scores_are_those_of_transformers_alone(pipeline: Any, other: Path) -> None:
    """Prompts, responses and whether they ended are read from the artifact; the scores are computed anew."""
    job = scored_by(other, pipeline.job("collected", batch_size=48, samples_per_prompt=1))
    run_stage(job)
    alone, seen = ByTransformers(other), set()
    for path in sorted(job.output.glob("*.arrow")):
        with pa.memory_map(str(path)) as source:
            for row in pa.ipc.open_file(source).read_all().to_pylist():
                expected = alone.score(row["prompt"], row["response"], ended=row["ended"])
                assert row["score.reward"] == pytest.approx(expected, abs=1e-5)
                seen.add(row["ended"])
    assert seen == {True, False}


def test_value_pretraining_has_the_same_reward(pipeline: Any, other: Path) -> None:
    """A critic stage that starts from the policy has the same mean score of that policy's held-out responses."""
    job = scored_by(other, pipeline.job("value", iterations=1, init="sft"), init=pipeline.folder("sft"))
    result = run_stage(job)
    assert result.tokenizer_digest == pipeline.result("sft").tokenizer_digest
    assert all("score_mean" in step.metrics for step in read(job.scratch / JOURNAL))


@pytest.mark.slow
def test_a_killed_policy_stage_ends_with_the_same_bytes(
    pipeline: Any,
    other: Path,
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def job_in(folder: Path) -> StageJob:
        return scored_by(other, pipeline.job("policy", folder=folder))

    same_bytes_after_a_kill(run_stage, job_in, tmp_path, step=2, contents=contents, monkeypatch=monkeypatch)


@pytest.mark.slow
def test_an_evaluation_is_judged_by_it(pipeline: Any, other: Path) -> None:
    job = pipeline.job("evaluation", judge=Judge(reward="main"))
    rewards = pipeline.job("policy").rewards
    result = run_stage(scored_by(other, job.model_copy(update={"rewards": rewards})))
    assert result.metrics["win_rate"] is not None
