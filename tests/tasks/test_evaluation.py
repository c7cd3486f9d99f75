"""A comparison of two models, on judgements and responses whose means can be worked out by hand."""

import random
import statistics
from typing import Any

import pytest
import torch

from models.sequences import collate
from schemas.recipe.rewards import Judge, Reward
from schemas.recipe.terms import ModelTerm
from schemas.records.metrics import estimated_metric_names, headline_metric_names
from tasks import evaluation
from tasks.data.rows import read_rows
from tasks.evaluation import (
    Judged,
    compare,
    run,
    shown,
)
from tasks.rewards import model_scores
from tasks.rollout.rollouts import Sampled


def judged(
    judgements: list[float], lengths: list[int], ended: list[bool], prompts: list[str] | None = None
) -> Judged:
    prompts = prompts or [f"p{index // 2}" for index in range(len(judgements))]
    sequences = collate([[1]] * len(lengths), [[5] * length for length in lengths], pad_token_id=0)
    sampled = Sampled(
        prompts=prompts,
        answers=[None] * len(prompts),
        responses=[f"r{index}" for index in range(len(judgements))],
        sequences=sequences,
        ended=torch.tensor(ended),
        sampler_logprobs=torch.zeros(sequences.response_ids.shape),
    )
    return Judged(sampled=sampled, judgements=torch.tensor(judgements))


def plainly(judgements: list[float], prompts: list[str]) -> Judged:
    return judged(judgements, [1] * len(judgements), [True] * len(judgements), prompts)


def test_gain_win_rate_and_error_by_hand() -> None:
    """Two prompts, two responses each: differences 1, 0 and 0, −1, so 0.5 and −0.5 by prompt.

    Mean 0. Standard deviation of (0.5, −0.5) with ddof 1 is √0.5; over √2 prompts the standard error is 0.5.
    """
    candidate = judged([1.0, 1.0, 0.0, 0.0], [4, 6, 2, 8], [True, True, False, True])
    baseline = judged([0.0, 1.0, 0.0, 1.0], [3, 3, 3, 3], [True] * 4)
    greedy = {"candidate": plainly([1.0, 0.0], ["p0", "p1"]), "baseline": plainly([1.0, 1.0], ["p0", "p1"])}
    found = compare({"candidate": candidate, "baseline": baseline}, greedy, name="accuracy")
    assert {metric: estimate.value for metric, estimate in found.items()} == {
        "accuracy": 0.5,
        "baseline_accuracy": 0.5,
        "accuracy_gain": 0.0,
        "win_rate": 0.5,
        "truncated_share": 0.25,
        "mean_response_length": 5.0,
        "baseline_mean_response_length": 3.0,
        "greedy_accuracy": 0.5,
        "baseline_greedy_accuracy": 1.0,
    }
    assert found["accuracy_gain"].standard_error == pytest.approx(0.5)
    assert found["win_rate"].standard_error == pytest.approx(0.25)  # 0.75 and 0.25 by prompt
    assert found["accuracy"].standard_error == pytest.approx(0.5)
    assert (found["accuracy"].num_clusters, found["accuracy"].num_rows) == (2, 4)
    assert found.keys() == estimated_metric_names("evaluation", judge="verifier")


def test_a_prompt_in_several_rows_of_the_test_split_is_one_prompt() -> None:
    """Rows of ``p`` and ``q`` interleaved: gains 1, 1 of ``p`` and 0, 0 of ``q``, so an error of 0.5, not √(1/12)."""
    prompts = ["p", "q", "p", "q"]
    found = compare(
        {"candidate": plainly([1.0, 0.0, 1.0, 0.0], prompts), "baseline": plainly([0.0] * 4, prompts)},
        dict.fromkeys(("candidate", "baseline"), plainly([0.0] * 4, prompts)),
        name="accuracy",
    )
    assert found["accuracy_gain"].standard_error == pytest.approx(0.5)
    assert found["greedy_accuracy"].num_clusters == 2


def test_the_error_of_a_gain_is_its_true_spread_where_prompts_stand_in_four_rows() -> None:
    """60 prompts in 4 rows each, all right or all wrong by the prompt: the gain's spread is √(2·0.24/60) = 0.089.

    Were its 240 rows independent it would be half of that.
    """
    rng = random.Random(11)
    prompts = [f"p{prompt}" for prompt in range(60) for _ in range(4)]
    gains, told = [], []
    for _ in range(600):
        right = {role: [float(rng.random() < 0.6) for _ in range(60)] for role in ("a", "b")}
        rows = {role: [each for each in values for _ in range(4)] for role, values in right.items()}
        found = compare(
            {"candidate": plainly(rows["a"], prompts), "baseline": plainly(rows["b"], prompts)},
            dict.fromkeys(("candidate", "baseline"), plainly(rows["a"], prompts)),
            name="accuracy",
        )["accuracy_gain"]
        gains.append(found.value)
        told.append(found.standard_error**2)
    assert statistics.fmean(told) ** 0.5 == pytest.approx(0.0894, rel=0.03)
    assert statistics.pstdev(gains) == pytest.approx(0.0894, rel=0.1)


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
    result = run(job.model_copy(update={"inputs": inputs, "rewards": rewards}))
    metrics = result.metrics
    assert result.uncertainty.keys() == estimated_metric_names("evaluation", judge="reward")
    assert metrics["score_gain"] == pytest.approx(metrics["score"] - metrics["baseline_score"], abs=1e-5)
    assert metrics.keys() == headline_metric_names("evaluation", judge="reward")


def test_each_model_is_loaded_once(pipeline: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two policies, each sampled and asked greedily, and one reward model that judges all four."""
    loaded: list[str] = []

    def counting(module: Any, name: str) -> None:
        load = getattr(module, name)

        def count(folder: Any, **settings: Any) -> Any:
            loaded.append(f"{name} {folder.parent.name}")
            return load(folder, **settings)

        monkeypatch.setattr(module, name, count)

    counting(evaluation, "load_policy")
    counting(model_scores, "load_scalar")
    job = pipeline.job("evaluation", folder=tmp_path, judge=Judge(reward="main"))
    inputs = {**job.inputs, "reward.main.0": pipeline.folder("reward")}
    rewards = {"main": Reward(terms=(ModelTerm(model="reward"),))}
    run(job.model_copy(update={"inputs": inputs, "rewards": rewards}))
    assert sorted(loaded) == ["load_policy policy", "load_policy sft", "load_scalar reward"]
