"""The loss of a reward model's minibatch has the right parts, and micro-batches change nothing."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from tests.tasks.kills import killed_in
from vantage.algorithms.preference_loss import bradley_terry
from vantage.ledger.journal import read
from vantage.models.folders import load_policy
from vantage.models.heads import (
    ScalarModel,
    load_scalar,
    reward_with_language_head,
    scores,
)
from vantage.models.logprobs import response_logprobs
from vantage.schemas.metric_names import COMPILED, NONFINITE, UNCOMPILED
from vantage.schemas.recipe.inputs import Data, Split
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.stages_on_data import RewardModelling
from vantage.schemas.recipe.work import PrepareData
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.metrics import curve_metric_names, headline_metric_names
from vantage.tasks import reward_model
from vantage.tasks.data.examples import (
    Completions,
    Rankings,
    codec_of,
    read_completions,
    read_rankings,
)
from vantage.tasks.data.rows import write_rows
from vantage.tasks.reward_model import (
    SIDES,
    accumulate_preferences,
    mean_score,
    measure_pairs,
    measure_preferences,
)
from vantage.tasks.stages import run_stage
from vantage.tasks.training.cuts import OVERHEAD, READ_AGAIN
from vantage.tasks.training.scratch import JOURNAL

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pairs(pipeline: Any) -> tuple[Any, Completions]:
    job = pipeline.job("reward")
    return job, read_completions(job.inputs["data"], "train", SIDES, codec_of(job, "init"))


def gradient(
    job: Any, preferences: Completions | Rankings, *, count: int = 10, **changes: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    work = job.work.model_copy(update=changes)
    metrics, _ = accumulate_preferences(reward, preferences, list(range(count)), work)
    return gradient_of(reward), metrics


def gradient_of(reward: ScalarModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in reward.parameters()])


@pytest.mark.parametrize("microbatch_size", [1, 3])
def test_micro_batches_leave_the_gradient_unchanged(
    pairs: tuple[Any, Completions], microbatch_size: int
) -> None:
    job, data = pairs
    coefficients = {"centre_coef": 0.1, "lm_coef": 0.5}
    whole, whole_metrics = gradient(job, data, **coefficients)
    parts, part_metrics = gradient(job, data, **coefficients, microbatch_size=microbatch_size)
    torch.testing.assert_close(parts / whole.abs().max(), whole / whole.abs().max(), atol=2e-5, rtol=0)
    assert part_metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


def test_the_loss_is_the_sum_of_its_weighted_parts(pairs: tuple[Any, Completions]) -> None:
    """The test computes Bradley-Terry, centring and NLL from scores and log-probabilities of other functions."""
    job, data = pairs
    _, metrics = gradient(job, data, centre_coef=0.1, lm_coef=0.5)
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    batch = data.batch(list(range(10)))
    with torch.no_grad():
        chosen, rejected = scores(reward, batch).double().chunk(2)
        policy = load_policy(job.inputs["init"])
        chosen_rows = batch.select(slice(0, 10))
        logprobs = response_logprobs(policy, chosen_rows, temperature=1.0).logprobs
    bradley_terry = torch.log1p(torch.exp(rejected - chosen)).mean()
    centring = (chosen + rejected).square().mean()
    nll = -logprobs[chosen_rows.response_mask].double().mean()
    assert metrics["loss"] == pytest.approx(float(bradley_terry + 0.1 * centring + 0.5 * nll), rel=1e-4)
    assert metrics["chosen_nll"] == pytest.approx(float(nll), rel=1e-4)
    assert metrics["score_mean"] == pytest.approx(float((chosen + rejected).mean() / 2), rel=1e-3, abs=1e-5)


def test_without_coefficients_only_the_preference_moves_the_weights(pairs: tuple[Any, Completions]) -> None:
    job, data = pairs
    plain, _ = gradient(job, data, lm_coef=0.0, centre_coef=0.0)
    with_language, _ = gradient(job, data, lm_coef=0.5, centre_coef=0.0)
    head_size = plain.shape[0] - sum(
        p.numel()
        for p in reward_with_language_head(job.inputs["init"], seed=1, device=CPU).backbone.parameters()
    )
    torch.testing.assert_close(with_language[-head_size:], plain[-head_size:])
    assert not torch.allclose(with_language[:-head_size], plain[:-head_size])


def test_pairs_without_margins_have_the_gradient_they_always_had(
    pairs: tuple[Any, Completions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss has the bits of the plain Bradley-Terry loss of the whole minibatch, where that is one pass."""
    monkeypatch.setitem(READ_AGAIN, "cpu", 10**6)
    monkeypatch.setitem(OVERHEAD, "cpu", 10**6)
    job, data = pairs
    assert data.margins is None
    found, metrics = gradient(job, data, lm_coef=0.0, centre_coef=0.0)
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    chosen, rejected = scores(reward, data.batch(list(range(10)))).chunk(2)
    loss = bradley_terry(chosen, rejected, denominator=10.0).loss
    loss.backward()
    assert torch.equal(found, gradient_of(reward))
    assert metrics["loss"] == loss.item()


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_each_pair_must_be_won_by_its_own_margin(
    pairs: tuple[Any, Completions], microbatch_size: int | None
) -> None:
    job, data = pairs
    margins = [0.3 * n for n in range(len(data))]
    plain, plain_metrics = gradient(job, data, lm_coef=0.0, centre_coef=0.0)
    found, metrics = gradient(
        job,
        replace(data, margins=margins),
        lm_coef=0.0,
        centre_coef=0.0,
        microbatch_size=microbatch_size,
    )
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    reward.double()
    chosen, rejected = scores(reward, data.batch(list(range(10)))).chunk(2)
    wanted = [chosen[n] - rejected[n] - margins[n] for n in range(10)]
    loss = sum((torch.log1p(torch.exp(-gap)) for gap in wanted), torch.zeros(())) / 10
    loss.backward()
    expected = gradient_of(reward)
    torch.testing.assert_close(found.double(), expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    # How many are right, and by how much, is counted without margins
    for name in ("train_pair_accuracy", "score_gap"):
        assert metrics[name] == pytest.approx(plain_metrics[name], rel=1e-3, abs=1e-5)
    assert not torch.allclose(found, plain)


def test_held_out_pairs_are_measured_without_margins(pairs: tuple[Any, Completions]) -> None:
    job, data = pairs
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    measured = measure_preferences(reward, replace(data, margins=[5.0] * len(data)), limits=PassLimits(32))
    assert measured == measure_preferences(reward, data, limits=PassLimits(32))


def test_held_out_pairs_are_measured_over_the_whole_set(
    pipeline: Any, pairs: tuple[Any, Completions]
) -> None:
    _, data = pairs
    reward = load_scalar(pipeline.folder("reward"))
    measured = measure_pairs(reward, data, limits=PassLimits(7))
    with torch.no_grad():
        chosen, rejected = scores(reward, data.batch(range(len(data)))).double().chunk(2)
    gap = chosen - rejected
    # A pair whose scores agree to rounding may fall on either side when batches are padded otherwise.
    certain, possible = (float((gap > bound).double().mean()) for bound in (1e-4, -1e-4))
    assert certain <= measured["pair_accuracy"].value <= possible
    assert measured["score_gap"].value == pytest.approx(float(gap.mean()), rel=1e-3, abs=1e-5)


def test_scores_are_centred_on_demonstrations(pipeline: Any) -> None:
    job = pipeline.job("reward")
    demonstrations = read_completions(job.inputs["centre_on"], "train", ["response"], codec_of(job, "init"))
    shifted = mean_score(load_scalar(pipeline.folder("reward")), demonstrations, limits=PassLimits(32))
    assert shifted == pytest.approx(0.0, abs=1e-4)
    assert pipeline.metrics("reward")["score_shift"] != 0.0


def test_only_the_first_demonstrations_are_scored_and_counted(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean is the sum of the first five scores over 5, and not over the number of all demonstrations."""
    job = pipeline.job("reward")
    demonstrations = read_completions(job.inputs["centre_on"], "train", ["response"], codec_of(job, "init"))
    reward = load_scalar(pipeline.folder("reward"))
    with torch.no_grad():
        of_five = scores(reward, demonstrations.batch(range(5))).double()
    monkeypatch.setattr(reward_model, "CENTRE_ROWS", 5)
    found = mean_score(reward, demonstrations, limits=PassLimits(2))
    assert found == pytest.approx(of_five.mean().item(), abs=1e-6)
    assert abs(found) > 1e-4 and len(demonstrations) > 5


# -- rankings

RANKED = [
    # of three, two tie for the second place: two pairs of weight ½
    {"prompt": "3 a+2?", "responses": ["a+2:345 #5", "a+2:349 #9", "#1"], "ranks": [1, 2, 2]},
    # one pair of weight 1, the second the better
    {"prompt": "1 a+1 b+1?", "responses": ["a+1:13 #4", "a+1:12 b+1:23 #3"], "ranks": [5.5, -2]},
    # of four, all six pairs, each of weight 1/6
    {"prompt": "7 a-1?", "responses": ["#0", "#2", "a-1:76 #6", "a-1:70 #0"], "ranks": [4, 3, 1, 2]},
    # of four, two tie for the first place and two for the last: four pairs of weight ¼
    {"prompt": "0 a+3?", "responses": ["#4", "a+3:0123 #3", "#9", "a+3:0123 #3 "], "ranks": [2, 1, 2, 1]},
]
WEIGHTED_PAIRS = [
    (0, 0, 1, 1 / 2), (0, 0, 2, 1 / 2),
    (1, 1, 0, 1.0),
    (2, 2, 3, 1 / 6), (2, 2, 1, 1 / 6), (2, 2, 0, 1 / 6), (2, 3, 1, 1 / 6), (2, 3, 0, 1 / 6), (2, 1, 0, 1 / 6),
    (3, 1, 0, 1 / 4), (3, 1, 2, 1 / 4), (3, 3, 0, 1 / 4), (3, 3, 2, 1 / 4),
]  # fmt: skip
"""Prompt, better response, worse response, weight: written off the ranks by hand."""


@pytest.fixture(scope="module")
def rankings(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Rankings]:
    folder = tmp_path_factory.mktemp("rankings")
    write_rows(folder, "train", RANKED)
    job = pipeline.job("reward", centre_coef=0.0, lm_coef=0.0)
    return job, read_rankings(folder, "train", codec_of(job, "init"))


def alone(reward: ScalarModel, rankings: Rankings, prompt: int) -> list[torch.Tensor]:
    """Return the score of each of a prompt's responses from a forward pass of its own, without padding."""
    sequences = rankings.batch([prompt]).sequences
    return [scores(reward, sequences.select([row]))[0] for row in range(len(sequences))]


@pytest.mark.parametrize("microbatch_size", [None, 1, 3])
def test_the_gradient_of_rankings_is_that_of_the_weighted_pairs_written_out(
    rankings: tuple[Any, Rankings], microbatch_size: int | None
) -> None:
    """The gradient equals float64 and plain loops, for K = 3 with a tie. Micro-batches of any size change nothing."""
    job, data = rankings
    found, metrics = gradient(job, data, count=4, microbatch_size=microbatch_size)
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    reward.double()
    each = [alone(reward, data, prompt) for prompt in range(4)]
    gaps = [each[prompt][better] - each[prompt][worse] for prompt, better, worse, _ in WEIGHTED_PAIRS]
    loss = sum(
        (weight * softplus(-gap) / 4 for gap, (*_, weight) in zip(gaps, WEIGHTED_PAIRS, strict=True)),
        torch.zeros((), dtype=torch.float64),
    )
    loss.backward()
    expected = gradient_of(reward)
    torch.testing.assert_close(found.double(), expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["score_gap"] == pytest.approx(sum(gap.item() for gap in gaps) / 13, rel=1e-3, abs=1e-6)
    assert metrics["train_pair_accuracy"] == pytest.approx(sum(gap.item() > 0 for gap in gaps) / 13)
    completion_scores = [score.item() for prompt in each for score in prompt]
    assert metrics["score_mean"] == pytest.approx(sum(completion_scores) / 13, rel=1e-3, abs=1e-6)


def test_every_completion_goes_through_the_model_once(rankings: tuple[Any, Rankings]) -> None:
    job, data = rankings
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    passed: list[int] = []
    reward.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: passed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    work = job.work.model_copy(update={"microbatch_size": 2})
    _, num_tokens = accumulate_preferences(reward, data, [0, 1, 2, 3], work)
    assert 2 <= len(passed) < 13, "two passes, each in parts of like length"
    assert sum(passed) == 13
    assert num_tokens == sum(
        len(data.prompt_ids[n]) + len(response) for n in range(4) for response in data.response_ids[n]
    )


def test_two_ranked_responses_are_a_pair(pairs: tuple[Any, Completions]) -> None:
    job, data = pairs
    as_rankings = Rankings(
        prompt_ids=data.prompt_ids,
        response_ids=[[worse, better] for better, worse in zip(*data.response_ids.values(), strict=True)],
        ranks=[[1, 0]] * len(data),
        pad_token_id=data.pad_token_id,
        num_too_long=0,
    )
    of_pairs, pair_metrics = gradient(job, data, lm_coef=0.0, centre_coef=0.0)
    of_rankings, ranking_metrics = gradient(job, as_rankings)
    torch.testing.assert_close(of_rankings, of_pairs, atol=2e-5 * float(of_pairs.abs().max()), rtol=0)
    assert ranking_metrics == pytest.approx(pair_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_held_out_rankings_are_measured_over_all_their_untied_pairs(
    rankings: tuple[Any, Rankings], batch_size: int
) -> None:
    job, data = rankings
    reward = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    measured = measure_preferences(reward, data, limits=PassLimits(batch_size))
    with torch.no_grad():
        each = [alone(reward.double(), data, prompt) for prompt in range(4)]
    gaps = [float(each[prompt][better] - each[prompt][worse]) for prompt, better, worse, _ in WEIGHTED_PAIRS]
    assert measured["pair_accuracy"].value == pytest.approx(sum(gap > 0 for gap in gaps) / 13)
    assert measured["score_gap"].value == pytest.approx(sum(gaps) / 13, rel=1e-3, abs=1e-6)
    losses = [
        weight * float(softplus(torch.tensor(-gap, dtype=torch.float64)))
        for gap, (*_, weight) in zip(gaps, WEIGHTED_PAIRS, strict=True)
    ]
    assert measured["preference_loss"].value == pytest.approx(sum(losses) / 4, rel=1e-5)


@pytest.fixture(scope="module")
def learning(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], StageJob]:
    """Return a job in a given folder that learns from a file that ranks the response with more sevens higher."""
    folder = tmp_path_factory.mktemp("learning")
    rng, rows = random.Random(3), []
    for n in range(220):
        sevens = [rng.randint(0, 4) for _ in range(rng.randint(2, 4))]
        responses = ["".join(rng.sample("7" * k + "abcdef"[: 6 - k], 6)) for k in sevens]
        if len(set(sevens)) > 1:
            rows.append({"q": f"Zeile {n}", "all": responses, "places": [4 - k for k in sevens]})
    source = folder / "mine.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = folder / "prepared"
    preparing = pipeline.job("preferences", folder=prepared).model_copy(
        update={
            "work": PrepareData(
                content="rankings",
                alone=True,
                data=Data(
                    source=str(source),
                    columns={"prompt": "q", "responses": "all", "ranks": "places"},
                    split=Split(validation=20, test=20),
                ),
            )
        }
    )
    run_stage(preparing)
    work = RewardModelling(
        kind="reward_model",
        init="sft",
        rankings="mine",
        batch_size=8,
        epochs=2.0,
        learning_rate=3e-3,
        warmup_steps=5,
        checkpoint_every=10,
    )

    def job(at: Path) -> StageJob:
        made: StageJob = pipeline.job("reward", folder=at).model_copy(
            update={"work": work, "inputs": {"init": pipeline.folder("sft"), "rankings": preparing.output}}
        )
        return made

    return job


@pytest.mark.slow
def test_a_reward_model_learns_a_ranking_and_a_kill_leaves_no_trace(
    learning: Callable[[Path], StageJob],
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = learning(tmp_path / "whole")
    result = run_stage(whole)
    assert result.metrics["pair_accuracy"] > 0.95
    assert result.metrics["preference_loss"] < 0.2
    assert result.metrics["score_gap"] > 2
    assert set(result.metrics) == headline_metric_names("reward_model") - {*UNCOMPILED}
    entries = read(whole.scratch / JOURNAL)
    assert {name for entry in entries for name in entry.metrics} == curve_metric_names("reward_model") - {
        "chosen_nll",
        *COMPILED,
        *NONFINITE,
    }

    with killed_in(23, monkeypatch):
        run_stage(learning(tmp_path / "killed"))
    resumed = learning(tmp_path / "killed")
    assert run_stage(resumed) == result
    assert contents(resumed.output) == contents(whole.output)
