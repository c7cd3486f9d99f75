"""Every preset without a critic equals hand-worked numbers, from scores to gradients, on two responses to one prompt.

Expected numbers are plain arithmetic, written out token by token: a1, a2, b1, b2, b3 of ``two_responses``, which
defines k1, ratios and weights. −0.05·k1 is −0.01, 0.02, −0.02, −0.01, 0.01. log π is −1, −2 | −0.5, −1.5, −1.
"""

from math import exp, log, sqrt

import pytest

from tests.tasks.two_responses import (
    CONSTANT_OF_10,
    RATIOS,
    SEQUENCE,
    Learnt,
    close,
    learn,
    scored_as,
    times,
)
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.presets import PRESETS
from vantage.tasks.rollout.group_sampling import fill

UNMOVED = [1.0] * 5
# log π − log π_ref after the update: k1 + log ρ
NEW_DELTAS = [
    0.2 + log(1.25),
    -0.4 + log(0.7),
    0.4 + log(0.75),
    0.2 + log(1.3),
    -0.2 + log(0.9),
]


def test_every_preset_without_a_critic_is_worked_out_here() -> None:
    worked_out = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {name for name in PRESETS if not Algorithm(preset=name).reads_critic} <= worked_out  # type: ignore[arg-type]


def has_no_critic(learnt: Learnt) -> bool:
    return learnt.estimates.targets is None and learnt.estimates.old_values is None


def test_policy_gradient() -> None:
    """The loss is the mean over both responses of the sum of −log π·(return from the token on)."""
    learnt = learn("policy_gradient", scores=[1.0, -1.0])
    assert has_no_critic(learnt)
    assert learnt.scaled_scores == [1.0, -1.0]
    assert learnt.rewards == close([-0.01, 0.02 + 1.0, -0.02, -0.01, 0.01 - 1.0])
    returns = [
        -0.01 + 1.02,  # 1.01
        1.02,
        -0.02 - 0.01 - 0.99,  # −1.02
        -0.01 - 0.99,  # −1
        -0.99,
    ]
    assert learnt.advantages == close(returns)
    update = learnt.policy_update(UNMOVED)
    assert update.loss == close((1.0 * 1.01 + 2.0 * 1.02 - 0.5 * 1.02 - 1.5 * 1.0 - 1.0 * 0.99) / 2)
    assert update.slopes == close([-1.01 / 2, -1.02 / 2, 1.02 / 2, 1.0 / 2, 0.99 / 2])


def test_policy_gradient_with_a_state_baseline() -> None:
    """With λ = 1 the advantage is the return from the token on, less the values 0.2, 0.4 | 0.1, −0.2, −0.4."""
    learnt = learn("policy_gradient", scores=[1.0, -1.0], advantage="gae", lambda_policy=1.0)
    advantages = [1.01 - 0.2, 1.02 - 0.4, -1.02 - 0.1, -1.0 - -0.2, -0.99 - -0.4]
    assert learnt.advantages == close(advantages)
    assert learnt.policy_update(UNMOVED).slopes == close([-advantage / 2 for advantage in advantages])


def test_reinforce_pp() -> None:
    """Advantages are returns whitened over all tokens. The clip is 0.2, and each response has the same weight."""
    learnt = learn("reinforce_pp", scores=[1.0, -1.0])
    assert has_no_critic(learnt)
    assert learnt.rewards == close([-0.01, 0.02 + 1.0, -0.02, -0.01, 0.01 - 1.0])
    # Returns 1.01, 1.02 | −1.02, −1, −0.99: their sum is −0.98
    mean = -0.98 / 5  # −0.196
    squares = (1.01 + 0.196) ** 2 + (1.02 + 0.196) ** 2 + (0.196 - 1.02) ** 2
    std = sqrt((squares + (0.196 - 1.0) ** 2 + (0.196 - 0.99) ** 2) / 5)
    a1, a2 = (1.01 - mean) / std, (1.02 - mean) / std
    b1, b2, b3 = (-1.02 - mean) / std, (-1.0 - mean) / std, (-0.99 - mean) / std
    assert learnt.advantages == close([a1, a2, b1, b2, b3])

    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-((a1 + a2) / 2 + (b1 + b2 + b3) / 3) / 2)
    assert first.slopes == close([-a1 / 4, -a2 / 4, -b1 / 6, -b2 / 6, -b3 / 6])
    # Later: 1.25 of A > 0 and 0.75 of A < 0 are clipped; 0.7 of A > 0 and 1.3 of A < 0 are not
    later = learnt.policy_update(RATIOS)
    assert later.loss == close(-((1.2 * a1 + 0.7 * a2) / 2 + (0.8 * b1 + 1.3 * b2 + 0.9 * b3) / 3) / 2)
    assert later.slopes == close([0.0, -0.7 * a2 / 4, 0.0, -1.3 * b2 / 6, -0.9 * b3 / 6])
    assert later.metrics["clip_fraction"] == close(2 / 5)


def test_reinforce_pp_baseline() -> None:
    """Advantages are scores less their group's mean, whitened over all tokens. The loss has a KL of 0.01 · ρ·½Δ², and
    the reward has none."""
    learnt = learn("reinforce_pp_baseline", scores=[1.0, 0.0], samples_per_prompt=2)
    assert has_no_critic(learnt)
    assert learnt.rewards == close([0.0, 1.0, 0.0, 0.0, 0.0])
    # 1 − 0.5 on two tokens, 0 − 0.5 on three: mean −0.1, variance (2·0.6² + 3·0.4²)/5 = 0.24
    a, b = 0.6 / sqrt(0.24), -0.4 / sqrt(0.24)
    assert learnt.advantages == close([a, a, b, b, b])

    # At first Δ is k1: 0.2, −0.4 | 0.4, 0.2, −0.2
    first = learnt.policy_update(UNMOVED)
    kl = ((0.02 + 0.08) / 2 + (0.08 + 0.02 + 0.02) / 3) / 2  # of ½Δ²
    assert first.loss == close(-(a + b) / 2 + 0.01 * kl)
    assert first.slopes == close(
        [
            (-a + 0.01 * 0.2) / 4,
            (-a - 0.01 * 0.4) / 4,
            (-b + 0.01 * 0.4) / 6,
            (-b + 0.01 * 0.2) / 6,
            (-b - 0.01 * 0.2) / 6,
        ]
    )
    assert first.metrics["kl_loss"] == close((0.02 + 0.08 + 0.08 + 0.02 + 0.02) / 5)
    # Later each Δ has moved by log ρ, and ρ multiplies ½Δ² without being differentiated
    later = learnt.policy_update(RATIOS)
    halves = [ratio * delta**2 / 2 for ratio, delta in zip(RATIOS, NEW_DELTAS, strict=True)]
    kl = ((halves[0] + halves[1]) / 2 + (halves[2] + halves[3] + halves[4]) / 3) / 2
    surrogate = -((1.2 + 0.7) * a / 2 + (0.8 + 1.3 + 0.9) * b / 3) / 2
    assert later.loss == close(surrogate + 0.01 * kl)
    d1, d2, d3, d4, d5 = NEW_DELTAS
    assert later.slopes == close(
        [
            (0.0 + 0.01 * 1.25 * d1) / 4,  # where the clip binds, the KL term still has a gradient
            (-0.7 * a + 0.01 * 0.7 * d2) / 4,
            (0.0 + 0.01 * 0.75 * d3) / 6,
            (-1.3 * b + 0.01 * 1.3 * d4) / 6,
            (-0.9 * b + 0.01 * 0.9 * d5) / 6,
        ]
    )


def test_rloo() -> None:
    """Advantages are R = score − 0.05·Σ k1 less the mean R of the others. A response's loss is the sum of −log π·A."""
    learnt = learn("rloo", scores=[1.0, -1.0], samples_per_prompt=2)
    assert has_no_critic(learnt)
    assert learnt.rewards == close([-0.01, 0.02 + 1.0, -0.02, -0.01, 0.01 - 1.0])
    # R_a = 1 − 0.05·(0.2 − 0.4) = 1.01, R_b = −1 − 0.05·(0.4 + 0.2 − 0.2) = −1.02
    assert learnt.advantages == close([1.01 + 1.02, 1.01 + 1.02, -1.02 - 1.01, -1.02 - 1.01, -1.02 - 1.01])
    update = learnt.policy_update(UNMOVED)
    assert update.loss == close(((1.0 + 2.0) * 2.03 - (0.5 + 1.5 + 1.0) * 2.03) / 2)
    assert update.slopes == close([-2.03 / 2, -2.03 / 2, 2.03 / 2, 2.03 / 2, 2.03 / 2])


def test_remax() -> None:
    """The reward is the score less the greedy response's at the end, and −0.05·k1 at each token. The loss of a token is
    −log π times the sum of rewards from it on."""
    learnt = learn("remax", scores=[1.0, -1.0], greedy_scores=[0.25, 0.25])
    assert has_no_critic(learnt)
    assert learnt.scaled_scores == [1.0, -1.0]
    assert learnt.rewards == close([-0.01, 0.02 + 1.0, -0.02, -0.01, 0.01 - 1.0])
    # From the end on, with 1 − 0.25 = 0.75 and −1 − 0.25 = −1.25 in the scores' place
    advantages = [
        -0.01 + 0.77,
        0.02 + 0.75,  # 0.77
        -0.02 - 1.25,
        -0.01 - 1.24,  # −1.25
        0.01 - 1.25,  # −1.24
    ]
    assert learnt.advantages == close(advantages)
    update = learnt.policy_update(UNMOVED)
    assert update.loss == close((1.0 * 0.76 + 2.0 * 0.77 - 0.5 * 1.27 - 1.5 * 1.25 - 1.0 * 1.24) / 2)
    assert update.slopes == close([-0.76 / 2, -0.77 / 2, 1.27 / 2, 1.25 / 2, 1.24 / 2])


def test_pvpo() -> None:
    """The advantage of every token is the score less the reference's mean score of the prompt. The clip is 0.2, and
    each response has the same weight."""
    learnt = learn("pvpo", scores=[1.0, -1.0], prompt_baseline=0.25, samples_per_prompt=2)
    assert has_no_critic(learnt)
    assert learnt.rewards == close([0.0, 1.0, 0.0, 0.0, -1.0])
    a, b = 1.0 - 0.25, -1.0 - 0.25
    assert learnt.advantages == close([a, a, b, b, b])
    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-(a + b) / 2)
    assert first.slopes == close([-a / 4, -a / 4, -b / 6, -b / 6, -b / 6])
    later = learnt.policy_update(RATIOS)
    assert later.loss == close(-((1.2 + 0.7) * a / 2 + (0.8 + 1.3 + 0.9) * b / 3) / 2)
    assert later.slopes == close([0.0, -0.7 * a / 4, 0.0, -1.3 * b / 6, -0.9 * b / 6])


def test_a_star_po() -> None:
    """The gradient of the mean regression loss (β2·log(π/π_ref) − (R − V*))² is 2·β2 times the surrogate's."""
    beta, v = 0.05, 0.25  # β2 of the KL; the paper has 1e-3
    learnt = learn("a_star_po", scores=[1.0, -1.0], prompt_baseline=v, kl_coef=beta)
    assert has_no_critic(learnt)
    # Σ k1 is −0.2 for a, and 0.4 for b
    a, b = 1.0 - beta * -0.2 - v, -1.0 - beta * 0.4 - v
    assert learnt.advantages == close([a, a, b, b, b])
    update = learnt.policy_update(UNMOVED)
    assert update.loss == close((3.0 * a + 3.0 * b) / 2)  # −Σ log π is 3 for both
    of_regression = [2 * beta * (beta * -0.2 - (1.0 - v)) / 2] * 2 + [
        2 * beta * (beta * 0.4 - (-1.0 - v)) / 2
    ] * 3
    assert [2 * beta * slope for slope in update.slopes] == close(of_regression)


def test_spo() -> None:
    """The advantage is the score less the prompt's running mean, whitened over all tokens. Clips are at 0.2 and 0.28,
    and every token has the same weight."""
    learnt = learn("spo", scores=[1.0, 0.0], prompt_baseline=0.4)
    assert has_no_critic(learnt)
    # 0.6 on two tokens, −0.4 on three: mean 0, variance (2·0.36 + 3·0.16)/5 = 0.24
    a, b = 0.6 / sqrt(0.24), -0.4 / sqrt(0.24)
    assert learnt.advantages == close([a, a, b, b, b])
    later = learnt.policy_update(RATIOS)
    assert later.loss == close(-((1.25 + 0.7) * a + (0.8 + 1.3 + 0.9) * b) / 5)
    assert later.slopes == close([-1.25 * a / 5, -0.7 * a / 5, 0.0, -1.3 * b / 5, -0.9 * b / 5])


def test_grpo() -> None:
    """Advantages are (R − mean)/(std + 1e-6) with ddof 1. The clip is 0.2, and each response's mean includes the KL
    0.04 · ρ·(e^−Δ − 1 + Δ)."""
    learnt = learn("grpo", scores=[1.0, 0.0], samples_per_prompt=2)
    assert has_no_critic(learnt)
    assert learnt.rewards == close([0.0, 1.0, 0.0, 0.0, 0.0])
    # Deviations ±0.5, variance (0.25 + 0.25)/(2 − 1) = 0.5
    a = 0.5 / (sqrt(0.5) + 1e-6)
    b = -a
    assert learnt.advantages == close([a, a, b, b, b])

    # At first Δ = 0.2, −0.4 | 0.4, 0.2, −0.2; the slope of e^−Δ − 1 + Δ is 1 − e^−Δ
    first = learnt.policy_update(UNMOVED)
    of_a = (exp(-0.2) - 1 + 0.2) + (exp(0.4) - 1 - 0.4)
    of_b = (exp(-0.4) - 1 + 0.4) + (exp(-0.2) - 1 + 0.2) + (exp(0.2) - 1 - 0.2)
    assert first.loss == close(-(a + b) / 2 + 0.04 * (of_a / 2 + of_b / 3) / 2)
    assert first.slopes == close(
        [
            (-a + 0.04 * (1 - exp(-0.2))) / 4,
            (-a + 0.04 * (1 - exp(0.4))) / 4,
            (-b + 0.04 * (1 - exp(-0.4))) / 6,
            (-b + 0.04 * (1 - exp(-0.2))) / 6,
            (-b + 0.04 * (1 - exp(0.2))) / 6,
        ]
    )
    # Later: 1.25 of A > 0 and 0.75 of A < 0 are clipped. With Δ moved by log ρ, ρ·e^−Δ = e^−k1 is as it was,
    # so ρ·(e^−Δ − 1 + Δ) = e^−k1 − ρ·(1 − Δ), and its slope ρ·(1 − e^−Δ) = ρ − e^−k1
    later = learnt.policy_update(RATIOS)
    d1, d2, d3, d4, d5 = NEW_DELTAS
    of_a = (exp(-0.2) - 1.25 * (1 - d1)) + (exp(0.4) - 0.7 * (1 - d2))
    of_b = (exp(-0.4) - 0.75 * (1 - d3)) + (exp(-0.2) - 1.3 * (1 - d4)) + (exp(0.2) - 0.9 * (1 - d5))
    surrogate = -((1.2 + 0.7) * a / 2 + (0.8 + 1.3 + 0.9) * b / 3) / 2
    assert later.loss == close(surrogate + 0.04 * (of_a / 2 + of_b / 3) / 2)
    assert later.slopes == close(
        times(
            SEQUENCE,
            [
                0.0 + 0.04 * (1.25 - exp(-0.2)),
                -0.7 * a + 0.04 * (0.7 - exp(0.4)),
                0.0 + 0.04 * (0.75 - exp(-0.4)),
                -1.3 * b + 0.04 * (1.3 - exp(-0.2)),
                -0.9 * b + 0.04 * (0.9 - exp(0.2)),
            ],
        )
    )


def test_dr_grpo() -> None:
    """Advantages are R − mean, divided by neither std nor length. A token's weight is 1/(2 responses · 10 tokens)."""
    learnt = learn("dr_grpo", scores=[1.0, 0.0], samples_per_prompt=2, max_length=10)
    assert has_no_critic(learnt)
    assert learnt.rewards == close([0.0, 1.0, 0.0, 0.0, 0.0])
    assert learnt.advantages == close([0.5, 0.5, -0.5, -0.5, -0.5])

    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-(0.5 + 0.5 - 0.5 - 0.5 - 0.5) / 20)
    assert first.slopes == close([-0.5 / 20, -0.5 / 20, 0.5 / 20, 0.5 / 20, 0.5 / 20])
    later = learnt.policy_update(RATIOS)
    assert later.loss == close(-0.5 * (1.2 + 0.7 - 0.8 - 1.3 - 0.9) / 20)
    assert later.slopes == close(times(CONSTANT_OF_10, [0.0, -0.7 * 0.5, 0.0, 1.3 * 0.5, 0.9 * 0.5]))


def test_dapo() -> None:
    """Groups whose responses are all right are sampled again, and overlong responses cost. The rest is as in grpo, with
    clips at 0.2 and 0.28, a mean over tokens and no KL."""
    rounds = [scored_as([1.0, 1.0]), scored_as([1.0, -1.0])]
    preset = Algorithm(preset="dapo")
    assert preset.drop_uniform_groups
    filled = fill(
        lambda number: rounds[number],
        samples_per_prompt=2,
        max_rounds=preset.max_sampling_rounds,
        pad_token_id=0,
    )
    assert (filled.rounds, filled.uniform_share) == (2, 0.5)
    assert filled.scored.scores.total.tolist() == [1.0, -1.0]

    # At most 3 tokens, the buffer is the last 0.2 of them, round(0.6) = 1: b, with 3, loses ((3 − 1) − 3)/1
    learnt = learn("dapo", scores=filled.scored, samples_per_prompt=2, max_length=3)
    assert has_no_critic(learnt)
    assert learnt.scaled_scores == [1.0, -1.0 - 1.0]
    assert learnt.rewards == close([0.0, 1.0, 0.0, 0.0, -2.0])
    # Mean −0.5, deviations ±1.5, variance (2.25 + 2.25)/(2 − 1) = 4.5
    a = 1.5 / (sqrt(4.5) + 1e-6)
    b = -a
    assert learnt.advantages == close([a, a, b, b, b])

    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-(2 * a + 3 * b) / 5)
    assert first.slopes == close([-a / 5, -a / 5, -b / 5, -b / 5, -b / 5])
    # Later, with ρ = 1.25 within the high clip of 0.28, and 1.3 beyond it
    later = learnt.policy_update([1.25, 1.3, 0.75, 1.3, 0.9])
    assert later.loss == close(-((1.25 + 1.28) * a + (0.8 + 1.3 + 0.9) * b) / 5)
    assert later.slopes == close([-1.25 * a / 5, 0.0, 0.0, -1.3 * b / 5, -0.9 * b / 5])
    assert later.metrics["clip_fraction"] == close(2 / 5)


def test_gspo() -> None:
    """Advantages are those of grpo without a KL. A response has one ratio, the geometric mean of its tokens' ratios,
    clipped to [0.9997, 1.0004]."""
    learnt = learn("gspo", scores=[1.0, 0.0], samples_per_prompt=2)
    assert has_no_critic(learnt)
    a = 0.5 / (sqrt(0.5) + 1e-6)
    assert learnt.advantages == close([a, a, -a, -a, -a])
    assert learnt.policy_update(UNMOVED).slopes == close([-a / 4, -a / 4, a / 6, a / 6, a / 6])

    # Both means are too low. With A > 0 the lower ratio counts, with A < 0 the clip
    low = learnt.policy_update(RATIOS)
    of_a = (1.25 * 0.7) ** (1 / 2)  # 0.94
    assert low.loss == close(-(of_a * a - 0.9997 * a) / 2)
    assert low.slopes == close([-of_a * a / 4, -of_a * a / 4, 0.0, 0.0, 0.0])
    # Both are too high, though b3 alone is not
    high = learnt.policy_update([1.25, 1.3, 1.3, 1.3, 0.9])
    of_b = (1.3 * 1.3 * 0.9) ** (1 / 3)  # 1.15
    assert high.loss == close(-(1.0004 * a - of_b * a) / 2)
    assert high.slopes == close([0.0, 0.0, of_b * a / 6, of_b * a / 6, of_b * a / 6])


def test_cispo() -> None:
    """Groups and shaping are as in dapo. The loss is the token mean of −min(ρ, 5)·A·log π with the weight held fixed,
    so no token loses its gradient."""
    assert Algorithm(preset="cispo").drop_uniform_groups
    learnt = learn("cispo", scores=[1.0, -1.0], samples_per_prompt=2, max_length=3)
    assert has_no_critic(learnt)
    assert learnt.scaled_scores == [1.0, -1.0 - 1.0]
    a = 1.5 / (sqrt(4.5) + 1e-6)
    assert learnt.advantages == close([a, a, -a, -a, -a])
    later = learnt.policy_update([6.0, 0.01, 0.01, 6.0, 0.9])
    weights = [5.0, 0.01, 0.01, 5.0, 0.9]
    assert later.slopes == close(times(weights, [-a / 5, -a / 5, a / 5, a / 5, a / 5]))
    logprobs = [-1 + log(6.0), -2 + log(0.01), -0.5 + log(0.01), -1.5 + log(6.0), -1 + log(0.9)]
    of_a, of_b = 5.0 * logprobs[0] + 0.01 * logprobs[1], sum(times(weights[2:], logprobs[2:]))
    assert later.loss == close(-(of_a - of_b) * a / 5)
    assert later.metrics["weight_clip_fraction"] == close(2 / 5)


def test_sapo() -> None:
    """The loss is −4/τ·σ(τ·(ρ − 1))·A with τ = 1 where A > 0 and 1.05 elsewhere, and its slope is −4·σ·(1 − σ)·ρ·A."""
    learnt = learn("sapo", scores=[1.0, 0.0], samples_per_prompt=2)
    assert has_no_critic(learnt)
    a = 0.5 / (sqrt(0.5) + 1e-6)
    assert learnt.advantages == close([a, a, -a, -a, -a])
    assert learnt.policy_update(UNMOVED).slopes == close([-a / 4, -a / 4, a / 6, a / 6, a / 6])

    def gate(ratio: float, temperature: float) -> float:
        return 1 / (1 + exp(-temperature * (ratio - 1)))

    gates = [gate(1.25, 1.0), gate(0.7, 1.0), gate(0.75, 1.05), gate(1.3, 1.05), gate(0.9, 1.05)]
    later = learnt.policy_update(RATIOS)
    of_a, of_b = 4 * (gates[0] + gates[1]), 4 / 1.05 * (gates[2] + gates[3] + gates[4])
    assert later.loss == close(-(of_a * a / 2 - of_b * a / 3) / 2)
    signed = [-a, -a, a, a, a]
    slopes = [4 * g * (1 - g) * ratio * by for g, ratio, by in zip(gates, RATIOS, signed, strict=True)]
    assert later.slopes == close(times(SEQUENCE, slopes))


def test_gmpo() -> None:
    """The loss is −A·(Π clip(ρ))^(1/length). A ratio is clipped from above where A > 0, and from below where A < 0."""
    learnt = learn("gmpo", scores=[1.0, 0.0], samples_per_prompt=2)
    assert has_no_critic(learnt)
    a = 0.5 / (sqrt(0.5) + 1e-6)
    assert learnt.advantages == close([a, a, -a, -a, -a])
    assert learnt.policy_update(UNMOVED).slopes == close([-a / 4, -a / 4, a / 6, a / 6, a / 6])
    low, high = 0.6703, 1.4918
    assert (low, high) == pytest.approx((exp(-0.4), exp(0.4)), abs=5e-5)
    later = learnt.policy_update([1.6, 0.5, 0.5, 1.6, 0.9])
    of_a, of_b = (high * 0.5) ** (1 / 2), (low * 1.6 * 0.9) ** (1 / 3)
    assert later.loss == close(-(of_a * a - of_b * a) / 2)
    assert later.slopes == close([0.0, -of_a * a / 4, 0.0, of_b * a / 6, of_b * a / 6])


def test_a_group_of_equal_scores_teaches_nothing() -> None:
    for preset in ("rloo", "grpo", "dr_grpo", "reinforce_pp_baseline", "gspo", "cispo", "sapo", "gmpo"):
        learnt = learn(preset, scores=[1.0, 1.0], samples_per_prompt=2, kl_coef=0.0, kl_loss_coef=0.0)
        assert learnt.advantages == [0.0] * 5, preset
        assert learnt.policy_update(UNMOVED).slopes == close([0.0] * 5), preset


def test_dual_clip_bounds_what_a_loser_costs() -> None:
    """b has A = −0.5. With c = 1.2 a token's loss is at most 1.2 · 0.5, and a ratio of 1.3 passes no gradient."""
    learnt = learn("dr_grpo", scores=[1.0, 0.0], samples_per_prompt=2, dual_clip=1.2)
    update = learnt.policy_update(RATIOS)
    assert update.loss == close((-0.5 * (1.2 + 0.7) + 0.5 * (0.8 + 1.2 + 0.9)) / 20)
    assert update.slopes == close([0.0, -0.7 * 0.5 / 20, 0.0, 0.0, 0.9 * 0.5 / 20])
    assert update.metrics["dual_clip_fraction"] == close(1 / 5)


@pytest.mark.parametrize("ended", [(True, False), (False, False)])
def test_the_overlong_filter_leaves_responses_that_were_cut_off_out_of_the_loss(
    ended: tuple[bool, bool],
) -> None:
    """Such responses stay in the advantages' baseline, but not in the denominator."""
    scored = scored_as([1.0, 0.0], ended=ended)
    learnt = learn("dapo", scores=scored, samples_per_prompt=2, max_length=20, overlong_filter=True)
    a = 0.5 / (sqrt(0.5) + 1e-6)
    update = learnt.policy_update(UNMOVED)
    if ended[0]:
        assert update.loss == close(-a)
        assert update.slopes == close([-a / 2, -a / 2, 0.0, 0.0, 0.0])
    else:
        assert update.loss == 0.0
        assert update.slopes == [0.0] * 5
    assert learnt.estimates.policy_mask.any(dim=1).tolist() == list(ended)
