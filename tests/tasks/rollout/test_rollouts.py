"""The score of a whole response is scaled by moments, clipped, and reduced by its length, in this order; the cost of a rollout is measured."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from vantage.algorithms.kl import full_kl
from vantage.algorithms.rewards import RunningMoments
from vantage.models import logprobs
from vantage.models.chunked_logits import logits_and_slope
from vantage.models.heads import ScalarModel, values
from vantage.models.output_head import OutputHead
from vantage.models.sequences import collate
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.algorithm import Algorithm, Returns
from vantage.tasks.rewards.scoring import Scores
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import (
    Sampled,
    Scored,
    scale,
    shape,
)
from vantage.tasks.updates.actor_critic import ActorCritic, load_actor_critic


def scored(scores: list[float], lengths: list[int], *, ended: bool = True) -> Scored:
    total = torch.tensor(scores)
    return Scored(
        sampled=Sampled(
            prompts=["p"] * len(scores),
            answers=[None] * len(scores),
            responses=["r"] * len(scores),
            sequences=collate([[1]] * len(scores), [[7] * length for length in lengths], pad_token_id=0),
            ended=torch.full((len(scores),), ended),
            sampler_logprobs=torch.zeros(len(scores), max(lengths)),
        ),
        scores=Scores(total=total, weighted_sum=total, by_term={}),
    )


@pytest.mark.parametrize("ended", [True, False])
def test_the_overlong_penalty_is_that_of_dapo(ended: bool) -> None:
    """By eq. 13 with L_max = 20 and a buffer of 0.2 · 20 = 4, each token beyond 16 costs a quarter, finished or not."""
    lengths = [1, 15, 16, 17, 18, 19, 20]
    scaled = scale(scored([1.0] * 7, lengths, ended=ended), Returns(overlong_buffer=0.2), None, max_length=20)
    assert scaled.tolist() == [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_the_numbers_of_the_paper() -> None:
    """16,384 tokens are free and 4,096 more cost 1 (DAPO §4.1, there with L_max = 20,480)."""
    scaled = scale(
        scored([0.0] * 4, [16_384, 16_385, 18_432, 20_480]),
        Returns(overlong_buffer=0.2),
        None,
        max_length=20_480,
    )
    assert scaled.tolist() == pytest.approx([0.0, -1 / 4096, -0.5, -1.0])


def test_a_buffer_of_less_than_a_token_is_one_token() -> None:
    scaled = scale(scored([0.0] * 3, [1, 2, 3]), Returns(overlong_buffer=0.01), None, max_length=3)
    assert scaled.tolist() == [0.0, 0.0, -1.0]


def test_a_buffer_is_a_whole_number_of_tokens() -> None:
    """0.3 · 9 = 2.7 tokens are 3."""
    scaled = scale(scored([0.0] * 4, [6, 7, 8, 9]), Returns(overlong_buffer=0.3), None, max_length=9)
    assert scaled.tolist() == pytest.approx([0.0, -1 / 3, -2 / 3, -1.0])


def test_scores_are_scaled_then_clipped_then_shortened() -> None:
    """(3 − 1)/2 = 1 is clipped to 0.5. The penalty of −1 for the length comes after the clip, and is not clipped."""
    moments = RunningMoments(count=4, mean=1.0, m2=16.0)
    returns = Returns(reward_scaling="normalise", reward_clip=0.5, overlong_buffer=0.5)
    scaled = scale(scored([3.0, 0.5, 3.0], [1, 1, 4]), returns, moments, max_length=4)
    assert scaled.tolist() == [0.5, -0.25, -0.5]


def test_scaling_alone_keeps_the_mean() -> None:
    moments = RunningMoments(count=4, mean=1.0, m2=16.0)
    scaled = scale(scored([3.0, -1.0], [1, 1]), Returns(reward_scaling="scale"), moments, max_length=4)
    assert scaled.tolist() == [1.5, -0.5]


def test_without_switches_scores_stay_as_they_are() -> None:
    assert scale(scored([3.0, -1.0], [1, 4]), Returns(), None, max_length=4).tolist() == [3.0, -1.0]


@dataclass
class Cost:
    """What was computed: passes of the trunks, in order, and the number of tokens whose logits were."""

    passes: list[str] = field(default_factory=list)
    logit_rows: int = 0


def cost_from_now_on(models: RolloutModels, monkeypatch: pytest.MonkeyPatch) -> Cost:
    """Count what the two models compute from now on."""
    cost = Cost()
    assert models.reference is not None
    for name, model in (("policy", models.policy), ("reference", models.reference)):
        model.causal_lm.base_model.register_forward_hook(lambda *call, name=name: cost.passes.append(name))

    def counting(hidden: Tensor, head: OutputHead, temperature: float) -> tuple[Tensor, Tensor | float]:
        cost.logit_rows += len(hidden)
        return logits_and_slope(hidden, head, temperature)

    monkeypatch.setattr(logprobs, "logits_and_slope", counting)
    return cost


@pytest.fixture
def shared(pipeline: Any) -> ActorCritic:
    """Return a policy with a value head on its trunk, beside an untrained reference; two sequences fit into a
    micro-batch.
    """
    job = pipeline.job("policy", microbatch_size=2)
    algorithm = Algorithm.model_validate({"preset": "ppo", "shared_trunk": True})
    work = job.work.model_copy(update={"algorithm": algorithm, "critic": None})
    inputs = {**job.inputs, "reference": pipeline.folder("model")}
    return load_actor_critic(
        job.model_copy(update={"work": resolve_work(work), "inputs": inputs}), torch.device("cpu")
    )


RESPONSES = scored([1.0, 0.5, 0.0, -1.0], [3, 1, 6, 2])


def test_one_pass_of_a_shared_trunk_gives_log_probabilities_and_values(
    shared: ActorCritic, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, policy = shared.models, shared.policy
    assert policy.value_head is not None
    without = shape(models, RESPONSES, returns=Returns())
    assert without.values is None
    cost = cost_from_now_on(models, monkeypatch)

    rollout = shape(models, RESPONSES, returns=Returns(), with_values=True)
    found = shared.values(rollout)

    assert cost.passes == ["policy"] * 2 + ["reference"] * 2
    assert cost.logit_rows == 12 + 12, "of each model, once for each of the responses' tokens"
    assert torch.equal(rollout.logprobs, without.logprobs)
    critic = ScalarModel(policy.causal_lm.base_model, policy.value_head)
    assert found is not None
    torch.testing.assert_close(found, values(critic, rollout.sequences))


def test_full_kl_in_the_reward_takes_one_pass_of_each_model(
    shared: ActorCritic, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = shared.models
    assert models.reference is not None
    by_k1 = shape(models, RESPONSES, returns=Returns(kl_coef=0.5))
    cost = cost_from_now_on(models, monkeypatch)

    rollout = shape(models, RESPONSES, returns=Returns(kl_coef=0.5, kl_kind="full"))

    assert cost.passes == ["policy", "reference"] * 2
    assert cost.logit_rows == 12 + 12
    assert torch.equal(rollout.logprobs, by_k1.logprobs)
    assert rollout.ref_logprobs is not None and by_k1.ref_logprobs is not None
    assert torch.equal(rollout.ref_logprobs, by_k1.ref_logprobs)
    sequences = rollout.sequences
    places = torch.arange(4)[:, None], sequences.response_positions
    with torch.no_grad():
        logits, ref_logits = (
            model.causal_lm(sequences.input_ids, attention_mask=sequences.attention_mask).logits[places]
            for model in (models.policy, models.reference)
        )
    expected = torch.where(sequences.response_mask, full_kl(logits, ref_logits), 0.0)
    torch.testing.assert_close(rollout.kl, expected, rtol=1e-4, atol=1e-5)
    # −0.5·KL on every token; the score on the last is what is above it
    assert rollout.rewards[2, :5].tolist() == pytest.approx((-0.5 * expected[2, :5]).tolist(), abs=1e-4)
