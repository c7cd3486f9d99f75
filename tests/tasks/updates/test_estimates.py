"""Estimates are right where the presets by hand do not reach: discounts, several groups, minibatches, and which responses count."""

from math import nan
from typing import Any

import pytest
import torch

from tests.tasks.two_responses import (
    VALUES,
    close,
    learn,
    scored_as,
)
from vantage.models.sequences import collate
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.tasks.rewards.scoring import Scores, Summand
from vantage.tasks.rollout.rollouts import Rollout, Sampled, Scored, build_rollout
from vantage.tasks.updates.estimates import critic_weight, estimate, minibatch_advantages, positive_responses
from vantage.tasks.updates.policy_losses import minibatch_of

RETURNS = {  # r = 0, 1 | 0, 0, −1, each from its token on with γ = ½
    "returns_to_go": [0.5, 1.0, -0.25, -0.5, -1.0],
    # less the greedy score of 0.5, on the last token
    "greedy_baseline": [0.25, 0.5, -0.375, -0.75, -1.5],
    # δ_t = r_t + ½·V_{t+1} − V_t with V = 0.2, 0.4 | 0.1, −0.2, −0.4, and λ = 0
    "gae": [0.0, 0.6, -0.2, 0.0, -0.6],
}


@pytest.mark.parametrize("kind", list(RETURNS))
def test_the_discount_counts_response_tokens(kind: str) -> None:
    learnt = learn(
        "ppo",
        scores=[1.0, -1.0],
        greedy_scores=[0.5, 0.5],
        advantage=kind,
        gamma=0.5,
        lambda_policy=0.0,
        lambda_value=1.0,
        kl_coef=0.0,
        whiten_advantages=False,
    )
    assert learnt.advantages == close(RETURNS[kind])
    if kind == "gae":
        assert learnt.targets == close(RETURNS["returns_to_go"])


HALF = {"kl_coef": 0.0, "whiten_advantages": False, "gamma": 0.5}


@pytest.mark.parametrize("bootstrap", [False, True])
def test_what_was_cut_off_goes_on_at_the_critics_value(bootstrap: bool) -> None:
    """a ended and b was cut off. Of the values after the last tokens, 9 for a and 0.6 for b, only b's counts.

    With γ = ½, r = 0, 1 | 0, 0, −1 and V = 0.2, 0.4 | 0.1, −0.2, −0.4, δ = 0, 0.6 | −0.2, 0, −0.6. The last of these is
    −1 + 0.4, or −0.6 + ½·0.6 = −0.3 with the bootstrap. λ_policy = ½ gives γλ = ¼, and λ_value = 1 gives the returns.
    """
    learnt = learn(
        "ppo",
        scores=scored_as([1.0, -1.0], ended=(True, False)),
        final_values=[9.0, 0.6],
        lambda_policy=0.5,
        lambda_value=1.0,
        bootstrap_truncated=bootstrap,
        **HALF,
    )
    last = -0.3 if bootstrap else -0.6
    assert learnt.advantages == close([0.15, 0.6, -0.2 + last / 16, last / 4, last])
    end = -0.7 if bootstrap else -1.0
    assert learnt.targets == close([0.5, 1.0, end / 4, end / 2, end])


def test_the_value_after_a_cut_is_blended_with_the_mean_return_too() -> None:
    """The returns are G = 0.5, 1 | −0.25, −0.5, −1 with the mean m = −0.05. V = m + (G − m)/2 explains ¾ of their variance.

    Blended, m + ¾·(V − m), the values are 0.15625, 0.34375 | −0.125, −0.21875, −0.40625, and 0.4375 is after b's cut, where the critic says
    0.6. So δ = 0.015625, 0.65625 | 0.015625, 0.015625, −1 + ½·0.4375 + 0.40625. γλ is ¼.
    """
    learnt = learn(
        "ppo",
        scores=scored_as([1.0, -1.0], ended=(True, False)),
        values=[0.225, 0.475, -0.15, -0.275, -0.525],
        final_values=[9.0, 0.6],
        lambda_policy=0.5,
        critic_blend=True,
        bootstrap_truncated=True,
        **HALF,
    )
    assert learnt.estimates.critic_weight == pytest.approx(0.75)
    assert learnt.advantages == close([0.1796875, 0.65625, -0.00390625, -0.078125, -0.375])


@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_horizon_of_two_tokens_with_lambda_1_gives_two_step_returns(bootstrap: bool) -> None:
    """b's first target is 0 + ½·0 + ¼·V_3 = −0.1. Its second is ½·(−1) and its last −1; with the bootstrap the value
    after the cut adds ¼·0.6 and ½·0.6."""
    learnt = learn(
        "ppo",
        scores=scored_as([1.0, -1.0], ended=(True, False)),
        final_values=[9.0, 0.6],
        lambda_policy=1.0,
        lambda_value=1.0,
        gae_horizon=2,
        bootstrap_truncated=bootstrap,
        **HALF,
    )
    targets = [0.5, 1.0, -0.1, -0.35, -0.7] if bootstrap else [0.5, 1.0, -0.1, -0.5, -1.0]
    assert learnt.targets == close(targets)
    assert learnt.advantages == close([g - v for g, v in zip(targets, VALUES, strict=True)])


def test_the_horizon_keeps_two_lambdas() -> None:
    """δ = 0, 0.6 | −0.2, 0, −0.6 as above. Two of them are summed with γλ = ¼ for the policy and 0 for the critic."""
    learnt = learn("ppo", scores=[1.0, -1.0], lambda_policy=0.5, lambda_value=0.0, gae_horizon=2, **HALF)
    assert learnt.advantages == close([0.15, 0.6, -0.2, -0.15, -0.6])
    deltas = [0.0, 0.6, -0.2, 0.0, -0.6]
    assert learnt.targets == close([d + v for d, v in zip(deltas, VALUES, strict=True)])


def rollout_of(scores: list[float], algorithm: Algorithm) -> Rollout:
    """Return the two responses again and again, with these scores and no KL; in float64."""
    total = torch.tensor(scores, dtype=torch.float64)
    pairs = scored_as(scores[:2]).select([0, 1] * (len(scores) // 2))
    by_term = pairs.scores.by_term
    scored = Scored(pairs.sampled, type(pairs.scores)(total=total, weighted_sum=total, by_term=by_term))
    nothing = torch.zeros(len(scores), 3, dtype=torch.float64)
    return build_rollout(scored, nothing, nothing, returns=algorithm, moments=None, kl_coef=0.0, max_length=3)


@pytest.mark.parametrize(
    ("group", "means"), [(2, [0.5, 0.5, 3.0, 3.0, 7.0, 7.0]), (3, [5 / 3] * 3 + [16 / 3] * 3)]
)
def test_groups_are_the_responses_that_stand_in_a_row(group: int, means: list[float]) -> None:
    algorithm = Algorithm.model_validate({"preset": "dr_grpo", "samples_per_prompt": group})
    scores = [1.0, 0.0, 4.0, 2.0, 7.0, 7.0]
    expected = [score - mean for score, mean in zip(scores, means, strict=True)]
    rollout = rollout_of(scores, algorithm)
    advantages = estimate(rollout, algorithm).advantages
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert advantages[1].tolist() == [advantages[1, 0]] * 3
    assert advantages[0].tolist() == [advantages[0, 0]] * 2 + [0.0]


def test_whitening_is_over_the_rollout_and_normalising_over_the_minibatch() -> None:
    """Response a alone, whitened over both responses, goes from 0.5 to 0.6/√0.24. Normalised by itself it is equal
    everywhere, so 0.
    """
    rows = torch.tensor([0])
    alone = {}
    for switch in ("whiten_advantages", "normalise_advantages"):
        learnt = learn("dr_grpo", scores=[1.0, 0.0], samples_per_prompt=2, **{switch: True})
        minibatch = minibatch_of(learnt.rollout, learnt.estimates, rows, learnt.work, max_length=10)
        alone[switch] = minibatch.advantages[0, :2].tolist()
        assert learnt.advantages == close([0.6 / 0.24**0.5] * 2 + [-0.4 / 0.24**0.5] * 3)
    assert alone == {
        "whiten_advantages": close([0.6 / 0.24**0.5] * 2),
        "normalise_advantages": [0.0, 0.0],
    }


@pytest.mark.parametrize("switch", ["whiten_advantages", "normalise_advantages"])
def test_what_the_overlong_filter_removed_has_no_part_in_whitening(switch: str) -> None:
    """a ended and b was cut off. With γ = ½, a's returns are ½ and 1: mean ¾, deviation ¼, whatever b's are."""
    scored = scored_as([1.0, -9.0], ended=(True, False))
    learnt = learn(
        "reinforce_pp", scores=scored, kl_coef=0.0, gamma=0.5, overlong_filter=True,
        whiten_advantages=switch == "whiten_advantages", normalise_advantages=switch == "normalise_advantages",
    )  # fmt: skip
    assert learnt.advantages[:2] == close([-1.0, 1.0])


def test_what_the_overlong_filter_removed_has_no_part_in_the_whitening_of_each_score() -> None:
    """Two groups of two, of which one response was cut off; the sum of two normalised scores is whitened over the others (GDPO)."""
    first, second = torch.tensor([1.0, 0.0, 3.0, 1.0]), torch.tensor([0.0, 2.0, 5.0, 5.0])
    whole = grouped(first, second, ended=[True, True, True, False])
    switches = {
        "preset": "grpo",
        "samples_per_prompt": 2,
        "normalise_each_score": True,
        "overlong_filter": True,
    }
    found = estimate(whole, Algorithm.model_validate(switches))
    # By hand: deviations ±0.5 of the first score, by a deviation of √0.5, times 2; of the second ∓1 by √2, times −3, and none in
    # the second group, whose scores are equal
    one, other = 0.5 / (0.5**0.5 + 1e-6), 1.0 / (2**0.5 + 1e-6)
    a, b = 2 * one - 3 * -other, -2 * one - 3 * other
    c = 2 * 1.0 / (2**0.5 + 1e-6)
    kept = torch.tensor([a, b, b, c, c, c], dtype=torch.float64)  # responses of 1, 2 and 3 tokens
    expected = (kept - kept.mean()) / (kept.var(correction=1) + 1e-8).sqrt()
    assert found.policy_mask.sum(dim=1).tolist() == [1, 2, 3, 0]
    assert found.advantages[found.policy_mask].tolist() == close(expected.tolist())


def grouped(first: torch.Tensor, second: torch.Tensor, *, ended: list[bool]) -> Rollout:
    """Return two groups of two responses, of 1 to 4 tokens, with two scores that count 2 and −3 times."""
    total = (2 * first - 3 * second).double()
    lengths = [1, 2, 3, 4]
    zeros = torch.zeros(4, 4, dtype=torch.float64)
    scored = Scored(
        sampled=Sampled(
            prompts=["p", "p", "q", "q"],
            answers=[None] * 4,
            responses=["r"] * 4,
            sequences=collate([[1]] * 4, [[5] * length for length in lengths], pad_token_id=0),
            ended=torch.tensor(ended),
            sampler_logprobs=zeros,
        ),
        scores=Scores(
            total=total,
            weighted_sum=total,
            by_term={},
            summands=(Summand(2.0, first.double()), Summand(-3.0, second.double())),
        ),
    )
    returns = Algorithm.model_validate("grpo")
    return build_rollout(scored, zeros, zeros, returns=returns, moments=None, kl_coef=0.0, max_length=10)


def test_a_rollout_of_which_the_overlong_filter_leaves_nothing_is_not_whitened() -> None:
    scored = scored_as([1.0, 0.0], ended=(False, False))
    learnt = learn("reinforce_pp", scores=scored, overlong_filter=True)
    assert learnt.policy_update([1.1] * 5).slopes == [0.0] * 5


def test_advantages_are_clipped_after_they_were_whitened() -> None:
    learnt = learn(
        "dr_grpo", scores=[10.0, 0.0], samples_per_prompt=2, whiten_advantages=True, advantage_clip=1.0
    )
    assert learnt.advantages == close([1.0, 1.0] + [-0.4 / 0.24**0.5] * 3)


def test_a_minibatch_of_which_nothing_is_learnt_is_not_normalised() -> None:
    algorithm = Algorithm.model_validate({"preset": "ppo_max_normalised"})
    unchanged = minibatch_advantages(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), algorithm)
    assert torch.equal(unchanged, torch.full((2, 3), 0.5))


def test_right_is_above_the_threshold_by_the_score_before_any_shaping() -> None:
    learnt = learn(
        "vapo", scores=[0.5001, 0.5], samples_per_prompt=2, positive_threshold=0.5, overlong_buffer=1.0
    )
    assert learnt.scaled_scores != [0.5001, 0.5]
    assert learnt.estimates.is_positive.tolist() == [True, False]


def test_without_a_weight_no_response_is_positive() -> None:
    learnt = learn("ppo", scores=[1.0, 1.0], positive_threshold=0.0)
    assert positive_responses(learnt.rollout, learnt.work.algorithm).tolist() == [False, False]


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_a_response_that_the_verifier_calls_wrong_is_never_imitated_by_the_preset_itself(
    wrong: float,
) -> None:
    """VAPO's threshold is 0, and a verifier's score of a wrong response may be just that."""
    learnt = learn("vapo", scores=[1.0, wrong], samples_per_prompt=2)
    assert learnt.estimates.is_positive.tolist() == [True, False]


# -- how far a critic is trusted


def switched(explained: float, *, threshold: float = 0.0, was_used: bool = True, **switches: Any) -> float:
    algorithm = Algorithm.model_validate({"preset": "evpo", "critic_ev_threshold": threshold, **switches})
    return critic_weight(explained, algorithm, was_used=was_used)


def test_a_critic_at_the_threshold_is_no_better_than_the_mean() -> None:
    assert [switched(ev) for ev in (-1.0, 0.0, 1e-9, 0.7)] == [0.0, 0.0, 1.0, 1.0]
    assert [switched(ev, threshold=0.2) for ev in (0.2, 0.21)] == [0.0, 1.0]
    assert switched(nan) == 0.0, "returns that do not vary"
    assert critic_weight(-5.0, Algorithm.model_validate("ppo"), was_used=False) == 1.0
    assert critic_weight(None, Algorithm.model_validate("grpo"), was_used=False) == 1.0


def test_hysteresis_keeps_a_critic_out_until_it_is_clearly_better() -> None:
    inside = 0.05
    assert switched(inside, was_used=True, critic_ev_hysteresis=0.1) == 1.0
    assert switched(inside, was_used=False, critic_ev_hysteresis=0.1) == 0.0
    assert switched(0.11, was_used=False, critic_ev_hysteresis=0.1) == 1.0
    assert switched(-0.01, was_used=True, critic_ev_hysteresis=0.1) == 0.0
    learnt = learn("evpo", scores=[1.0, -1.0], critic_was_used=False, critic_ev_hysteresis=0.9)
    assert 0 < (learnt.estimates.explained_variance or 0) < 0.9
    assert learnt.estimates.critic_weight == 0.0


def test_a_blended_critic_counts_by_its_explained_variance() -> None:
    """With γ = ½ and r = 0, 1 | 0, 0, −1 the returns are G = 0.5, 1 | −0.25, −0.5, −1, whose mean is −0.05.
    V = 0.2, 0.4 | 0.1, −0.2, −0.4."""
    learnt = learn(
        "evpo", scores=[1.0, -1.0], kl_coef=0.0, gamma=0.5, critic_ev_threshold=None, critic_blend=True
    )
    returns = [0.5, 1.0, -0.25, -0.5, -1.0]
    weight = learnt.estimates.critic_weight
    assert weight == learnt.estimates.explained_variance
    assert 0 < weight < 1
    expected = [g - (-0.05 + weight * (v - -0.05)) for g, v in zip(returns, VALUES, strict=True)]
    assert learnt.advantages == close(expected)
    blind = learn(
        "evpo",
        scores=[1.0, -1.0],
        values=[-value for value in VALUES],
        kl_coef=0.0,
        gamma=0.5,
        critic_ev_threshold=None,
        critic_blend=True,
    )
    assert blind.advantages == close([g - -0.05 for g in returns])


def test_a_blended_critic_draws_what_follows_a_cut_to_the_mean_too() -> None:
    """a ended, and b was cut off where the critic predicts 0.6. With λ = 0 each value shows: A = r + γ·V' − V'."""
    learnt = learn(
        "evpo",
        scores=scored_as([1.0, -1.0], ended=(True, False)),
        final_values=[9.0, 0.6],
        kl_coef=0.0,
        gamma=0.5,
        lambda_policy=0.0,
        bootstrap_truncated=True,
        critic_ev_threshold=None,
        critic_blend=True,
    )
    k = learnt.estimates.critic_weight
    a1, a2, b1, b2, b3 = [-0.05 + k * (v - -0.05) for v in VALUES]
    after = -0.05 + k * (0.6 - -0.05)
    expected = [a2 / 2 - a1, 1 - a2, b2 / 2 - b1, b3 / 2 - b2, -1 + after / 2 - b3]
    assert learnt.advantages == close(expected)


@pytest.mark.parametrize("share_of_noise", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0, 1.3, 2.0])
def test_the_switched_advantages_have_the_variance_of_the_better_baseline(share_of_noise: float) -> None:
    """The test draws two hundred pairs of responses with known returns, and critics from perfect to worse than any
    constant.
    """
    generator = torch.Generator().manual_seed(3)
    algorithm = Algorithm.model_validate({"preset": "evpo", "kl_coef": 0.0})
    scores = torch.randn(400, generator=generator)
    rollout = rollout_of(scores.tolist(), algorithm)
    mask = rollout.sequences.response_mask
    returns = scores.double()[:, None].expand(400, 3)  # γ = 1, and the score is the whole reward
    noise = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    values = (1 - share_of_noise) * returns + share_of_noise * noise
    estimates = estimate(rollout, algorithm, old_values=values)

    of_critic = (returns - values)[mask].var(correction=0).item()
    of_mean = returns[mask].var(correction=0).item()
    assert estimates.explained_variance == pytest.approx(1 - of_critic / of_mean)
    assert estimates.advantages[mask].var(correction=0).item() == pytest.approx(min(of_critic, of_mean))
