"""A reward model's minibatch: what its loss is made of, and that micro-batches change nothing."""

from typing import Any

import pytest
import torch

from models.folders import load_policy
from models.heads import load_scalar, reward_with_language_head, scores
from models.logprobs import response_logprobs
from tasks.examples import Completions, codec_of, read_completions
from tasks.reward_model import SIDES, accumulate_preferences, mean_score, measure_pairs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pairs(pipeline: Any) -> tuple[Any, Completions]:
    job = pipeline.job("reward")
    return job, read_completions(job.inputs["data"], "train", SIDES, codec_of(job, "init"))


def gradient(job: Any, pairs: Completions, **changes: Any) -> tuple[torch.Tensor, dict[str, float]]:
    reward, language_head = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
    work = job.work.model_copy(update=changes)
    metrics, _ = accumulate_preferences(reward, language_head, pairs, list(range(10)), work)
    return torch.cat([p.grad.flatten() for p in reward.parameters()]), metrics


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
    """Bradley-Terry, centring and NLL worked out from scores and log-probabilities that other functions gave."""
    job, data = pairs
    _, metrics = gradient(job, data, centre_coef=0.1, lm_coef=0.5)
    reward, _ = reward_with_language_head(job.inputs["init"], seed=1, device=CPU)
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
        for p in reward_with_language_head(job.inputs["init"], seed=1, device=CPU)[0].backbone.parameters()
    )
    torch.testing.assert_close(with_language[-head_size:], plain[-head_size:])
    assert not torch.allclose(with_language[:-head_size], plain[:-head_size])


def test_held_out_pairs_are_measured_over_the_whole_set(
    pipeline: Any, pairs: tuple[Any, Completions]
) -> None:
    _, data = pairs
    reward = load_scalar(pipeline.folder("reward"))
    measured = measure_pairs(reward, data, batch_size=7)
    with torch.no_grad():
        chosen, rejected = scores(reward, data.batch(range(len(data)))).double().chunk(2)
    gap = chosen - rejected
    # A pair whose scores agree to rounding may fall on either side when batches are padded otherwise.
    certain, possible = (float((gap > bound).double().mean()) for bound in (1e-4, -1e-4))
    assert certain <= measured["pair_accuracy"] <= possible
    assert measured["score_gap"] == pytest.approx(float(gap.mean()), rel=1e-3, abs=1e-5)


def test_scores_are_centred_on_demonstrations(pipeline: Any) -> None:
    job = pipeline.job("reward")
    demonstrations = read_completions(job.inputs["centre_on"], "train", ["response"], codec_of(job, "init"))
    shifted = mean_score(load_scalar(pipeline.folder("reward")), demonstrations, batch_size=32)
    assert shifted == pytest.approx(0.0, abs=1e-4)
    assert pipeline.metrics("reward")["score_shift"] != 0.0
