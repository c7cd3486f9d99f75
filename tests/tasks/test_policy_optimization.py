"""In one policy update micro-batches change nothing, and the switches do what they document."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from vantage.algorithms.rewards import RunningMoments
from vantage.schemas.recipe.algorithm import Algorithm, Returns
from vantage.tasks.data.examples import read_prompts
from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS
from vantage.tasks.rollout import rollouts
from vantage.tasks.rollout.group_sampling import Filled
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import (
    Rollout,
    Scored,
    sample_and_score,
    shape,
)
from vantage.tasks.updates.actor_critic import ActorCritic, load_actor_critic
from vantage.tasks.updates.estimates import estimate
from vantage.tasks.updates.gathering import Gathered, describe
from vantage.tasks.updates.policy_losses import Coefficients, accumulate_losses, minibatch_of
from vantage.tasks.updates.policy_state import initial_state

CPU = torch.device("cpu")
MAX_LENGTH = 24
Rolled = tuple[Any, RolloutModels, Rollout, torch.Tensor]


@pytest.fixture(scope="module")
def rolled(pipeline: Any) -> Rolled:
    job = pipeline.job("policy")
    networks = load_actor_critic(job, CPU)
    models = networks.models
    prompts = read_prompts(job.inputs["prompts"], "train", models.codec)
    scored = sample_and_score(models, prompts, list(range(12)), seed=1)
    rollout = shape(models, scored, returns=job.work.algorithm)
    old_values = networks.values(rollout)
    assert old_values is not None
    return job, models, rollout, old_values


def gradients_of(networks: ActorCritic) -> torch.Tensor:
    """Return every parameter's gradient in one row; 0 where there is none."""
    parameters = [p for module in networks.modules.values() for p in module.parameters()]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def test_the_reference_is_the_policy_at_first_so_rewards_are_the_scores(
    rolled: Rolled,
) -> None:
    _, _, rollout, _ = rolled
    mask = rollout.sequences.response_mask
    torch.testing.assert_close(rollout.kl, torch.zeros_like(rollout.kl), atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout.rewards.sum(dim=1), rollout.scores.total, atol=1e-5, rtol=1e-5)
    last = mask.sum(dim=1) - 1
    at_last = rollout.rewards[torch.arange(len(last)), last]
    torch.testing.assert_close(at_last, rollout.scores.total, atol=1e-5, rtol=1e-5)
    missing = ~rollout.sampled.ended
    raw = rollout.scores.by_term["reward"]
    torch.testing.assert_close(rollout.scores.total, raw - missing.float())


def test_the_samplers_log_probabilities_save_the_policys_own_pass(
    rolled: Rolled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's pass stays; the exact KL needs the policy's own too, and the ratio still begins at the sampler's."""
    _, models, rollout, _ = rolled
    scored = Scored(rollout.sampled, rollout.scores)
    read: list[object] = []
    compute = rollouts.rollout_logprobs

    def counted(model: object, *others: Any, **options: Any) -> Any:
        read.append(model)
        return compute(model, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(rollouts, "rollout_logprobs", counted)
    by_policy = shape(models, scored, returns=Returns(kl_coef=0.1))
    assert read == [models.policy, models.reference]
    read.clear()
    by_sampler = shape(models, scored, returns=Returns(kl_coef=0.1), by_sampler=True)
    assert read == [models.reference]
    assert by_sampler.logprobs is rollout.sampled.sampler_logprobs
    torch.testing.assert_close(by_sampler.logprobs, by_policy.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_sampler.rewards, by_policy.rewards, atol=1e-5, rtol=1e-5)
    read.clear()
    exact = shape(models, scored, returns=Returns(kl_coef=0.1, kl_kind="full"), by_sampler=True)
    assert read == [models.policy]
    assert exact.logprobs is rollout.sampled.sampler_logprobs


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum", "constant"])
@pytest.mark.parametrize("microbatch_size", [1, 5])
def test_micro_batches_leave_every_gradient_unchanged(
    rolled: Rolled, aggregation: str, microbatch_size: int
) -> None:
    job, _, rollout, old_values = rolled
    gradients = []
    metrics = []
    for size in (None, microbatch_size):
        threshold = float(rollout.scores.total.median())
        algorithm = job.work.algorithm.model_copy(
            update={"aggregation": aggregation, "positive_threshold": threshold}
        )
        work = job.work.model_copy(update={"algorithm": algorithm, "microbatch_size": size})
        networks = load_actor_critic(job.model_copy(update={"work": work}), CPU)
        estimates = estimate(rollout, algorithm, old_values=old_values)
        rows = torch.arange(len(rollout.sequences))
        minibatch = minibatch_of(rollout, estimates, rows, work, max_length=MAX_LENGTH)
        metrics.append(accumulate_losses(networks, minibatch, work, coefs=Coefficients()))
        gradients.append(gradients_of(networks))
    scale = gradients[0].abs().max()
    torch.testing.assert_close(gradients[1] / scale, gradients[0] / scale, atol=2e-5, rtol=0)
    assert metrics[0].keys() == metrics[1].keys() >= {"positive_nll", "entropy", "value_mse", "clip_fraction"}
    for name, value in metrics[0].items():
        assert metrics[1][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_before_any_update_the_ratio_is_one(rolled: Rolled) -> None:
    job, _, rollout, old_values = rolled
    networks = load_actor_critic(job, CPU)
    estimates = estimate(rollout, job.work.algorithm, old_values=old_values)
    minibatch = minibatch_of(rollout, estimates, torch.arange(6), job.work, max_length=MAX_LENGTH)
    metrics = accumulate_losses(networks, minibatch, job.work, coefs=Coefficients())
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_deviation"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0.0


def gae_by_hand(rewards: list[float], values: list[float], lam: float) -> list[float]:
    """Return Σ_k λ^k δ_{t+k}, γ = 1, in plain Python."""
    deltas = [r + following - v for r, v, following in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    return [sum(lam**k * delta for k, delta in enumerate(deltas[start:])) for start in range(len(deltas))]


def test_estimates_of_vapo_by_hand(rolled: Rolled) -> None:
    """λ_policy is 1 − 1/(α·l) by each response's own length. λ_value is 1, so targets are Monte-Carlo returns."""
    _, _, rollout, old_values = rolled
    algorithm = Algorithm.model_validate(
        {"preset": "vapo", "length_adaptive_alpha": 0.5, "positive_threshold": 0.1}
    )
    estimates = estimate(rollout, algorithm, old_values=old_values)
    for row, length in enumerate(rollout.sequences.lengths.tolist()):
        rewards = rollout.rewards[row, :length].double().tolist()
        values = old_values[row, :length].double().tolist()
        lam = min(max(1.0 - 1.0 / (0.5 * length), 0.0), 1.0)
        assert estimates.advantages[row, :length].tolist() == pytest.approx(
            gae_by_hand(rewards, values, lam), abs=1e-4
        )
        returns = [sum(rewards[start:]) for start in range(length)]
        assert estimates.targets[row, :length].tolist() == pytest.approx(returns, abs=1e-4)
    assert estimates.is_positive.tolist() == [score > 0.1 for score in rollout.scores.total.tolist()]


def test_estimates_of_ppo_are_whitened_and_have_one_lambda(
    rolled: Rolled,
) -> None:
    _, _, rollout, old_values = rolled
    algorithm = Algorithm.model_validate("ppo")
    estimates = estimate(rollout, algorithm, old_values=old_values)
    valid = estimates.advantages[rollout.sequences.response_mask]
    assert valid.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert valid.std().item() == pytest.approx(1.0, abs=1e-2)
    length = int(rollout.sequences.lengths[0])
    rewards, values = rollout.rewards[0, :length].tolist(), old_values[0, :length].tolist()
    by_hand = [a + v for a, v in zip(gae_by_hand(rewards, values, 0.95), values, strict=True)]
    assert estimates.targets[0, :length].tolist() == pytest.approx(by_hand, abs=1e-4)
    assert not estimates.is_positive.any()


def test_positives_by_a_verifier_ignore_the_score(rolled: Rolled) -> None:
    _, _, rollout, old_values = rolled
    algorithm = Algorithm.model_validate({"preset": "vapo", "positive_verifier": "arithmetic"})
    estimates = estimate(
        rollout, algorithm, old_values=old_values, positive_verifier=BUILTIN_FUNCTIONS["arithmetic"]
    )
    assert estimates.is_positive.tolist() == [
        response.endswith(f"#{eval_prompt(prompt)}") and response.count("#") == 1
        for prompt, response in zip(rollout.sampled.prompts, rollout.sampled.responses, strict=True)
    ]


def eval_prompt(prompt: str) -> int:
    """Return the answer of ``3 a+4 b-2?``, worked out apart from the task's own code."""
    start, *steps = prompt.rstrip("?").split()
    return int(start) + sum(int(step[1:]) for step in steps)


def test_a_rollout_is_described_in_plain_means(rolled: Rolled) -> None:
    job, models, rollout, old_values = rolled
    algorithm = job.work.algorithm
    estimates = estimate(rollout, algorithm, old_values=old_values)
    filled = Filled(scored=Scored(rollout.sampled, rollout.scores), rounds=1, uniform_share=0.25)
    gathered = Gathered(filled, RunningMoments(), rollout, None, None, estimates, {})
    described = describe(gathered, algorithm, initial_state(job))
    assert (described["sampling_rounds"], described["uniform_group_share"]) == (1, 0.25)
    assert described["kl_coef"] == algorithm.kl_coef
    lengths = [int(length) for length in rollout.sequences.lengths]
    assert described["response_length_mean"] == pytest.approx(sum(lengths) / len(lengths))
    last_ids = [
        int(ids[length - 1]) for ids, length in zip(rollout.sequences.response_ids, lengths, strict=True)
    ]
    end = models.codec.tokenizer.eos_token_id
    assert described["truncated_share"] == pytest.approx(sum(last != end for last in last_ids) / len(lengths))
    assert described["score_mean"] == pytest.approx(
        sum(rollout.scores.total.tolist()) / len(lengths), rel=1e-5
    )


def test_where_the_filter_leaves_no_token_the_advantages_have_no_mean(rolled: Rolled) -> None:
    """All responses were cut off: two metrics are undefined and left out, and all others are numbers."""
    job, _, rollout, old_values = rolled
    cut = replace(rollout, sampled=replace(rollout.sampled, ended=torch.zeros_like(rollout.sampled.ended)))
    algorithm = job.work.algorithm.model_copy(update={"overlong_filter": True})
    estimates = estimate(cut, algorithm, old_values=old_values)
    filled = Filled(scored=Scored(cut.sampled, cut.scores), rounds=1, uniform_share=0.25)
    gathered = Gathered(filled, RunningMoments(), cut, None, None, estimates, {})
    described = describe(gathered, algorithm, initial_state(job))
    assert described.keys().isdisjoint({"advantage_mean", "advantage_std"})
    assert described["truncated_share"] == 1.0
    assert all(math.isfinite(each) for each in described.values())
