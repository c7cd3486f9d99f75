"""A comparison of two models, on judgements and responses whose means can be worked out by hand."""

from typing import Any

import pytest
import torch

from models.sequences import collate
from schemas.metrics import measured_by
from schemas.recipe import Judge
from tasks.data.rows import read_rows
from tasks.evaluation import Judged, compare, run, shown
from tasks.sampling.rollouts import Sampled


def judged(judgements: list[float], lengths: list[int], ended: list[bool]) -> Judged:
    prompts = [f"p{index // 2}" for index in range(len(judgements))]
    sequences = collate([[1]] * len(lengths), [[5] * length for length in lengths], pad_token_id=0)
    sampled = Sampled(
        prompts=prompts,
        answers=[None] * len(prompts),
        responses=[f"r{index}" for index in range(len(judgements))],
        sequences=sequences,
        ended=torch.tensor(ended),
    )
    return Judged(sampled=sampled, judgements=torch.tensor(judgements))


def test_gain_win_rate_and_error_by_hand() -> None:
    """Two prompts, two responses each: differences 1, 0 and 0, −1, so 0.5 and −0.5 by prompt.

    Mean 0. Standard deviation of (0.5, −0.5) with ddof 1 is √0.5; over √2 prompts the standard error is 0.5.
    """
    candidate = judged([1.0, 1.0, 0.0, 0.0], [4, 6, 2, 8], [True, True, False, True])
    baseline = judged([0.0, 1.0, 0.0, 1.0], [3, 3, 3, 3], [True] * 4)
    metrics = compare({"candidate": candidate, "baseline": baseline}, name="accuracy", num_prompts=2)
    assert metrics == {
        "accuracy": 0.5,
        "baseline_accuracy": 0.5,
        "accuracy_gain": 0.0,
        "accuracy_gain_standard_error": pytest.approx(0.5),
        "win_rate": 0.5,
        "truncated_share": 0.25,
        "mean_response_length": 5.0,
        "baseline_mean_response_length": 3.0,
    }


def test_what_is_shown_is_the_first_prompts_whatever_came_of_them() -> None:
    candidate = judged([0.0] * 8, [1] * 8, [True] * 8)
    rows = shown({"candidate": candidate, "baseline": candidate})
    assert [row["prompt"] for row in rows] == ["p0", "p1", "p2"]
    assert [row["candidate"] for row in rows] == ["r0", "r2", "r4"]


def test_every_response_to_every_test_prompt_is_kept(pipeline: Any) -> None:
    folder = pipeline.folder("evaluation")
    prompts = [row["prompt"] for row in read_rows(pipeline.folder("prompts"), "test")]
    for role in ("candidate", "baseline"):
        rows = read_rows(folder, role)
        assert [row["prompt"] for row in rows] == [prompt for prompt in prompts for _ in range(2)]
        accuracy = sum(row["judgement"] for row in rows) / len(rows)
        name = "accuracy" if role == "candidate" else "baseline_accuracy"
        assert pipeline.metrics("evaluation")[name] == pytest.approx(accuracy)


def test_a_model_against_itself_gains_nothing(pipeline: Any, tmp_path: Any) -> None:
    """Both sides draw from the same random stream, so equal models give equal responses."""
    job = pipeline.job("evaluation", folder=tmp_path)
    job = job.model_copy(update={"inputs": {**job.inputs, "candidate": job.inputs["baseline"]}})
    metrics = run(job).metrics
    assert metrics["accuracy_gain"] == 0.0
    assert metrics["win_rate"] == 0.5
    assert metrics["mean_response_length"] == metrics["baseline_mean_response_length"]


def test_a_reward_can_be_the_judge(pipeline: Any, tmp_path: Any) -> None:
    job = pipeline.job("evaluation", folder=tmp_path, judge=Judge(reward="main"))
    inputs = {**job.inputs, "reward.main.0": pipeline.folder("reward")}
    rewards = pipeline.job("policy").rewards
    metrics = run(job.model_copy(update={"inputs": inputs, "rewards": rewards})).metrics
    assert metrics["score_gain"] == pytest.approx(metrics["score"] - metrics["baseline_score"], abs=1e-5)
    assert metrics.keys() == measured_by("evaluation", judge="reward")
