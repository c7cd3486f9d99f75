"""Every preset with a critic equals numbers from scores to gradients that are worked out by hand on two responses.

Expected numbers are plain arithmetic, written out token by token: a1, a2, b1, b2, b3 of ``two_responses``, where
k1, values, ratios and weights stand. −0.05·k1 is −0.01, 0.02, −0.02, −0.01, 0.01.
"""

from math import e, log, sqrt

from tests.tasks.two_responses import (
    NEW_VALUES,
    RATIOS,
    SEQUENCE,
    TOKEN,
    VALUES,
    close,
    learn,
    times,
)
from vantage.algorithms.rewards import RunningMoments
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.presets import PRESETS

UNMOVED = [1.0] * 5


def gae_095(rewards: list[float]) -> list[float]:
    """Return A_t = δ_t + 0.95·A_{t+1}, δ_t = r_t + V_{t+1} − V_t, for the values 0.2, 0.4 | 0.1, −0.2, −0.4."""
    r_a1, r_a2, r_b1, r_b2, r_b3 = rewards
    a2 = r_a2 + 0.0 - 0.4
    a1 = r_a1 + 0.4 - 0.2 + 0.95 * a2
    b3 = r_b3 + 0.0 - -0.4
    b2 = r_b2 + -0.4 - -0.2 + 0.95 * b3
    b1 = r_b1 + -0.2 - 0.1 + 0.95 * b2
    return [a1, a2, b1, b2, b3]


def whitened(numbers: list[float]) -> list[float]:
    """Return (A − mean)/std over the five tokens, the population's std; 1e-8 is the ε that is documented."""
    mean = sum(numbers) / 5
    std = sqrt(sum((number - mean) ** 2 for number in numbers) / 5)
    return [(number - mean) / (std + 1e-8) for number in numbers]


def plus_values(advantages: list[float]) -> list[float]:
    return [advantage + value for advantage, value in zip(advantages, VALUES, strict=True)]


def errors(targets: list[float]) -> list[float]:
    """Return V − target at the new values."""
    return [value - target for value, target in zip(NEW_VALUES, targets, strict=True)]


def half_mean_square(numbers: list[float]) -> float:
    return sum(number**2 for number in numbers) / 2 / 5


def test_every_preset_with_a_critic_is_worked_out_here() -> None:
    worked_out = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {name for name in PRESETS if Algorithm(preset=name).reads_critic} <= worked_out  # type: ignore[arg-type]


def test_a2c() -> None:
    """With λ = 0 advantages are δ and targets r_t + V_{t+1}. The loss of the one step is the token mean of −log π·A."""
    learnt = learn("a2c", scores=[1.0, -1.0])
    assert learnt.scaled_scores == [1.0, -1.0]
    assert learnt.rewards == close([-0.01, 0.02 + 1.0, -0.02, -0.01, 0.01 - 1.0])
    deltas = [
        -0.01 + 0.4 - 0.2,  # 0.19
        1.02 + 0.0 - 0.4,  # 0.62
        -0.02 + -0.2 - 0.1,  # −0.32
        -0.01 + -0.4 - -0.2,  # −0.21
        -0.99 + 0.0 - -0.4,  # −0.59
    ]
    assert learnt.advantages == close(deltas)
    assert learnt.targets == close([-0.01 + 0.4, 1.02, -0.02 - 0.2, -0.01 - 0.4, -0.99])
    # −log π·A with log π = −1, −2, −0.5, −1.5, −1: 0.19 + 1.24 − 0.16 − 0.315 − 0.59 = 0.365
    update = learnt.policy_update(UNMOVED)
    assert update.loss == close(0.365 / 5)
    assert update.slopes == close([-0.19 / 5, -0.62 / 5, 0.32 / 5, 0.21 / 5, 0.59 / 5])
    # V − target = 0.3 − 0.39, 0.9 − 1.02, 0 + 0.22, −0.3 + 0.41, 0.1 + 0.99
    regression = learnt.value_update(NEW_VALUES)
    assert regression.loss == close((0.09**2 + 0.12**2 + 0.22**2 + 0.11**2 + 1.09**2) / 2 / 5)
    assert regression.slopes == close([-0.09 / 5, -0.12 / 5, 0.22 / 5, 0.11 / 5, 1.09 / 5])


def test_ppo() -> None:
    """The preset has GAE(0.95) whitened over the rollout, clips of ratio and value at 0.2, and a mean over tokens."""
    learnt = learn("ppo", scores=[1.0, -1.0])
    rewards = [-0.01, 0.02 + 1.0, -0.02, -0.01, 0.01 - 1.0]
    assert learnt.rewards == close(rewards)
    advantages = gae_095(rewards)
    assert advantages == close([0.779, 0.62, -1.051975, -0.7705, -0.59])
    assert learnt.targets == close([0.979, 1.02, -0.951975, -0.9705, -0.99])  # A + V, not whitened
    a1, a2, b1, b2, b3 = whitened(advantages)
    assert learnt.advantages == close([a1, a2, b1, b2, b3])

    # The first update: ρ = 1, the loss is −mean A = 0 and its slopes are −A/5
    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(0.0)
    assert first.slopes == close([-a1 / 5, -a2 / 5, -b1 / 5, -b2 / 5, -b3 / 5])
    # Later: ρ = 1.25, 0.7 | 0.75, 1.3, 0.9, and A > 0 | A < 0
    losses = [
        -1.2 * a1,  # the clip binds
        -0.7 * a2,  # below the clip, but A > 0: the worse of the two is the unclipped
        -0.8 * b1,  # the clip binds
        -1.3 * b2,  # above the clip, but A < 0
        -0.9 * b3,
    ]
    later = learnt.policy_update(RATIOS)
    assert later.loss == close(sum(losses) / 5)
    assert later.slopes == close([0.0, -0.7 * a2 / 5, 0.0, -1.3 * b2 / 5, -0.9 * b3 / 5])
    assert later.metrics["clip_fraction"] == close(2 / 5)

    # New values 0.3, 0.9 | 0, −0.3, 0.1 clipped to old ± 0.2: 0.3, 0.6 | 0, −0.3, −0.2
    regression = learnt.value_update(NEW_VALUES)
    clipped = [
        0.3 - 0.979,
        0.6 - 1.02,  # −0.42 is larger than 0.9 − 1.02 = −0.12: the clip binds
        0.0 - -0.951975,
        -0.3 - -0.9705,
        0.1 - -0.99,  # 1.09 is larger than −0.2 + 0.99 = 0.79: the clip does not bind
    ]
    assert regression.loss == close(half_mean_square(clipped))
    assert regression.slopes == close([clipped[0] / 5, 0.0, clipped[2] / 5, clipped[3] / 5, clipped[4] / 5])
    assert regression.metrics["value_clip_fraction"] == close(1 / 5)


def test_ppo_kl_penalty() -> None:
    """The loss is that of ppo without clips, plus β·KL(old‖new) as ρ − 1 − log ρ with β = 1."""
    learnt = learn("ppo_kl_penalty", scores=[1.0, -1.0])
    rewards = [-0.01, 0.02 + 1.0, -0.02, -0.01, 0.01 - 1.0]
    assert learnt.rewards == close(rewards)
    a1, a2, b1, b2, b3 = advantages = whitened(gae_095(rewards))
    assert learnt.advantages == close(advantages)
    targets = [0.979, 1.02, -0.951975, -0.9705, -0.99]
    assert learnt.targets == close(targets)

    # At ρ = 1 the penalty and its slope are 0
    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(0.0)
    assert first.slopes == close([-a1 / 5, -a2 / 5, -b1 / 5, -b2 / 5, -b3 / 5])
    # Later −ρ·A + (ρ − 1 − log ρ), whose slope by log π is −ρ·A + (ρ − 1)
    losses = [
        -1.25 * a1 + (0.25 - log(1.25)),
        -0.7 * a2 + (-0.3 - log(0.7)),
        -0.75 * b1 + (-0.25 - log(0.75)),
        -1.3 * b2 + (0.3 - log(1.3)),
        -0.9 * b3 + (-0.1 - log(0.9)),
    ]
    later = learnt.policy_update(RATIOS)
    assert later.loss == close(sum(losses) / 5)
    assert later.slopes == close(
        times(
            TOKEN,
            [
                -1.25 * a1 + 0.25,
                -0.7 * a2 - 0.3,
                -0.75 * b1 - 0.25,
                -1.3 * b2 + 0.3,
                -0.9 * b3 - 0.1,
            ],
        )
    )
    assert later.metrics["clip_fraction"] == 0.0

    regression = learnt.value_update(NEW_VALUES)
    assert regression.loss == close(half_mean_square(errors(targets)))
    assert regression.slopes == close(times(TOKEN, errors(targets)))


def test_kl_penalty_by_the_other_estimate() -> None:
    """The estimate −log ρ has the slope −1 by log π everywhere, also at ρ = 1."""
    learnt = learn("ppo_kl_penalty", scores=[1.0, -1.0], kl_penalty_kind="k1", kl_penalty_coef=0.5)
    a1, a2, b1, b2, b3 = learnt.advantages
    first = learnt.policy_update(UNMOVED)
    assert first.slopes == close(times(TOKEN, [-a1 - 0.5, -a2 - 0.5, -b1 - 0.5, -b2 - 0.5, -b3 - 0.5]))
    later = learnt.policy_update(RATIOS)
    surrogate = -(1.25 * a1 + 0.7 * a2 + 0.75 * b1 + 1.3 * b2 + 0.9 * b3) / 5
    assert later.loss == close(surrogate - 0.5 * sum(map(log, RATIOS)) / 5)
    assert later.metrics["old_kl"] == close(-sum(map(log, RATIOS)) / 5)


# Scores 2 and 0.8 after 2.4 and −1.2 were seen: the mean of the four is 1, and the deviations
# 1, −0.2, 1.4, −2.2 have squares 1 + 0.04 + 1.96 + 4.84 = 7.84, so σ = √(7.84/4) = 1.4
EARLIER = RunningMoments(count=2, mean=0.6, m2=1.8**2 + 1.8**2)


def test_ppo_max() -> None:
    """The score is (R − μ)/σ, clipped to ±0.3. The rest is as in ppo without whitening, and without demonstrations."""
    learnt = learn("ppo_max", scores=[2.0, 0.8], moments=EARLIER)
    assert learnt.scaled_scores == close([0.3, -0.2 / 1.4])  # 1/1.4 is clipped, −0.143 is not
    rewards = [-0.01, 0.02 + 0.3, -0.02, -0.01, 0.01 - 0.2 / 1.4]
    assert learnt.rewards == close(rewards)
    a1, a2, b1, b2, b3 = advantages = gae_095(rewards)
    assert learnt.advantages == close(advantages)
    assert a1 > 0 > a2
    assert b1 < 0 < b2 < b3
    targets = plus_values(advantages)
    assert learnt.targets == close(targets)

    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-(a1 + a2 + b1 + b2 + b3) / 5)
    assert first.slopes == close([-a1 / 5, -a2 / 5, -b1 / 5, -b2 / 5, -b3 / 5])
    # Later: ρ = 1.25 of A > 0, 0.7 and 0.75 of A < 0 and 1.3 of A > 0 are all clipped
    later = learnt.policy_update(RATIOS)
    assert later.loss == close((-1.2 * a1 - 0.8 * a2 - 0.8 * b1 - 1.2 * b2 - 0.9 * b3) / 5)
    assert later.slopes == close([0.0, 0.0, 0.0, 0.0, -0.9 * b3 / 5])

    # Values clipped to 0.3, 0.6 | 0, −0.3, −0.2 are nearer the targets 0.31, 0.32 | −0.18, −0.16, −0.13 throughout
    regression = learnt.value_update(NEW_VALUES)
    assert regression.loss == close(half_mean_square(errors(targets)))
    assert regression.slopes == close(times(TOKEN, errors(targets)))
    # where it is not: 0.3 for 0.9 of a2, target 0.32; clipped to 0.2, which is farther off
    regression = learnt.value_update([0.3, 0.3 - 0.2, 0.0, -0.3, 0.1])
    assert regression.slopes[1] == close((0.1 - targets[1]) / 5)
    regression = learnt.value_update([0.3, 0.4, 0.0, -0.3, -0.1])
    assert regression.slopes[4] == 0.0  # −0.1 is clipped to −0.2, farther from −0.13


def test_ppo_max_scaling() -> None:
    """The score is R/σ and is not clipped, values are clipped, and the rest is as in ppo_max."""
    learnt = learn("ppo_max_scaling", scores=[2.0, 0.8], moments=EARLIER)
    assert learnt.scaled_scores == close([2.0 / 1.4, 0.8 / 1.4])
    rewards = [-0.01, 0.02 + 2.0 / 1.4, -0.02, -0.01, 0.01 + 0.8 / 1.4]
    assert learnt.rewards == close(rewards)
    a1, a2, b1, b2, b3 = advantages = gae_095(rewards)
    assert learnt.advantages == close(advantages)
    assert min(advantages) > 0
    targets = plus_values(advantages)
    assert learnt.targets == close(targets)

    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-(a1 + a2 + b1 + b2 + b3) / 5)
    assert first.slopes == close([-a1 / 5, -a2 / 5, -b1 / 5, -b2 / 5, -b3 / 5])
    # Later: all A > 0, so only what is above 1.2 is clipped
    later = learnt.policy_update(RATIOS)
    assert later.loss == close((-1.2 * a1 - 0.7 * a2 - 0.75 * b1 - 1.2 * b2 - 0.9 * b3) / 5)
    assert later.slopes == close([0.0, -0.7 * a2 / 5, -0.75 * b1 / 5, 0.0, -0.9 * b3 / 5])

    # Targets 1.39, 1.45 | 0.47, 0.52, 0.58: 0.9 → 0.6 and 0.1 → −0.2 are clipped away from theirs
    regression = learnt.value_update(NEW_VALUES)
    clipped = [0.3 - targets[0], 0.6 - targets[1], 0.0 - targets[2], -0.3 - targets[3], -0.2 - targets[4]]
    assert regression.loss == close(half_mean_square(clipped))
    assert regression.slopes == close([clipped[0] / 5, 0.0, clipped[2] / 5, clipped[3] / 5, 0.0])


def test_ppo_max_normalised() -> None:
    """Scores are as in ppo_max. Advantages are normalised and clipped to ±0.5 in the minibatch, and values are not."""
    learnt = learn("ppo_max_normalised", scores=[2.0, 0.8], moments=EARLIER)
    assert learnt.scaled_scores == close([0.3, -0.2 / 1.4])
    rewards = [-0.01, 0.02 + 0.3, -0.02, -0.01, 0.01 - 0.2 / 1.4]
    assert learnt.rewards == close(rewards)
    plain = gae_095(rewards)  # 0.114, −0.08, −0.278, 0.044, 0.267: mean 0.013, std 0.184
    targets = plus_values(plain)
    assert learnt.targets == close(targets)
    b2 = whitened(plain)[3]
    assert 0.16 < b2 < 0.17
    assert learnt.advantages == close([0.5, -0.5, -0.5, b2, 0.5])

    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-(0.5 - 0.5 - 0.5 + b2 + 0.5) / 5)
    assert first.slopes == close([-0.5 / 5, 0.5 / 5, 0.5 / 5, -b2 / 5, -0.5 / 5])
    later = learnt.policy_update(RATIOS)
    assert later.loss == close((-1.2 * 0.5 + 0.8 * 0.5 + 0.8 * 0.5 - 1.2 * b2 - 0.9 * 0.5) / 5)
    assert later.slopes == close([0.0, 0.0, 0.0, 0.0, -0.9 * 0.5 / 5])

    regression = learnt.value_update(NEW_VALUES)
    assert regression.loss == close(half_mean_square(errors(targets)))
    assert regression.slopes == close(times(TOKEN, errors(targets)))


def test_ppo_vapo_baseline() -> None:
    """Policy and critic have GAE(0.95), without KL or whitening, and each response has the same weight."""
    learnt = learn("ppo_vapo_baseline", scores=[1.0, -1.0])
    assert learnt.rewards == close([0.0, 1.0, 0.0, 0.0, -1.0])
    # δ = 0.2, 0.6 | −0.3, −0.2, −0.6
    a2, b3 = 0.6, -0.6
    a1 = 0.2 + 0.95 * 0.6  # 0.77
    b2 = -0.2 + 0.95 * -0.6  # −0.77
    b1 = -0.3 + 0.95 * -0.77  # −1.0315
    assert learnt.advantages == close([a1, a2, b1, b2, b3])
    targets = [0.77 + 0.2, 0.6 + 0.4, -1.0315 + 0.1, -0.77 - 0.2, -0.6 - 0.4]
    assert learnt.targets == close(targets)

    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-((0.77 + 0.6) / 2 + (-1.0315 - 0.77 - 0.6) / 3) / 2)
    assert first.slopes == close([-0.77 / 4, -0.6 / 4, 1.0315 / 6, 0.77 / 6, 0.6 / 6])
    later = learnt.policy_update(RATIOS)
    assert later.loss == close(
        ((-1.2 * 0.77 - 0.7 * 0.6) / 2 + (0.8 * 1.0315 + 1.3 * 0.77 + 0.9 * 0.6) / 3) / 2
    )
    assert later.slopes == close([0.0, -0.7 * 0.6 / 4, 0.0, 1.3 * 0.77 / 6, 0.9 * 0.6 / 6])

    # The critic's loss is a mean over tokens all the same
    regression = learnt.value_update(NEW_VALUES)
    assert regression.loss == close(half_mean_square(errors(targets)))
    assert regression.slopes == close(times(TOKEN, errors(targets)))


def test_vc_ppo() -> None:
    """Advantages have λ = 0.95 as in ppo_vapo_baseline, and targets λ = 1, so they are the returns."""
    learnt = learn("vc_ppo", scores=[1.0, -1.0])
    assert learnt.rewards == close([0.0, 1.0, 0.0, 0.0, -1.0])
    assert learnt.advantages == close([0.77, 0.6, -1.0315, -0.77, -0.6])
    assert learnt.targets == close([1.0, 1.0, -1.0, -1.0, -1.0])

    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-((0.77 + 0.6) / 2 + (-1.0315 - 0.77 - 0.6) / 3) / 2)
    assert first.slopes == close([-0.77 / 4, -0.6 / 4, 1.0315 / 6, 0.77 / 6, 0.6 / 6])
    later = learnt.policy_update(RATIOS)
    assert later.loss == close(
        ((-1.2 * 0.77 - 0.7 * 0.6) / 2 + (0.8 * 1.0315 + 1.3 * 0.77 + 0.9 * 0.6) / 3) / 2
    )
    assert later.slopes == close(times(SEQUENCE, [0.0, -0.7 * 0.6, 0.0, 1.3 * 0.77, 0.9 * 0.6]))

    # V − target = 0.3 − 1, 0.9 − 1, 0 + 1, −0.3 + 1, 0.1 + 1
    regression = learnt.value_update(NEW_VALUES)
    assert regression.loss == close((0.7**2 + 0.1**2 + 1.0**2 + 0.7**2 + 1.1**2) / 2 / 5)
    assert regression.slopes == close([-0.7 / 5, -0.1 / 5, 1.0 / 5, 0.7 / 5, 1.1 / 5])


def test_vapo() -> None:
    """λ_policy is 1 − 1/(α·l), targets are returns, clips are 0.2 and 0.28, and the right response adds 0.1 · NLL."""
    learnt = learn("vapo", scores=[1.0, -1.0], length_adaptive_alpha=1.0, samples_per_prompt=2)
    assert learnt.rewards == close([0.0, 1.0, 0.0, 0.0, -1.0])
    # a, 2 tokens: λ = 1 − 1/2; b, 3 tokens: λ = 1 − 1/3. δ = 0.2, 0.6 | −0.3, −0.2, −0.6
    a1 = 0.2 + 0.6 / 2  # 0.5
    b2 = -0.2 - 0.6 * 2 / 3  # −0.6
    b1 = -0.3 - 0.6 * 2 / 3  # −0.7
    assert learnt.advantages == close([a1, 0.6, b1, b2, -0.6])
    assert learnt.targets == close([1.0, 1.0, -1.0, -1.0, -1.0])

    # a is right: its NLL is a mean over its two tokens, −(−1 − 2)/2 = 1.5 at first
    first = learnt.policy_update(UNMOVED)
    assert first.loss == close(-(0.5 + 0.6 - 0.7 - 0.6 - 0.6) / 5 + 0.1 * 1.5)
    assert first.slopes == close([-0.5 / 5 - 0.1 / 2, -0.6 / 5 - 0.1 / 2, 0.7 / 5, 0.6 / 5, 0.6 / 5])
    assert first.metrics["positive_nll"] == close(1.5)
    # Later, with ρ = 1.25 within the high clip of 0.28, and 1.3 beyond it
    later = learnt.policy_update([1.25, 1.3, 0.75, 1.3, 0.9])
    nll = -(-1.0 + log(1.25) - 2.0 + log(1.3)) / 2
    assert later.loss == close((-1.25 * 0.5 - 1.28 * 0.6 + 0.8 * 0.7 + 1.3 * 0.6 + 0.9 * 0.6) / 5 + 0.1 * nll)
    assert later.slopes == close(
        [-1.25 * 0.5 / 5 - 0.1 / 2, 0.0 - 0.1 / 2, 0.0, 1.3 * 0.6 / 5, 0.9 * 0.6 / 5]
    )
    assert later.metrics["clip_fraction"] == close(2 / 5)

    regression = learnt.value_update(NEW_VALUES)
    assert regression.loss == close((0.7**2 + 0.1**2 + 1.0**2 + 0.7**2 + 1.1**2) / 2 / 5)
    assert regression.slopes == close([-0.7 / 5, -0.1 / 5, 1.0 / 5, 0.7 / 5, 1.1 / 5])


def test_the_alpha_of_vapo_makes_every_lambda_of_short_responses_zero() -> None:
    """1 − 1/(0.05 · 3) is below 0, so A = δ. No response is right, so no NLL is added."""
    learnt = learn("vapo", scores=[-0.5, -1.0], samples_per_prompt=2)
    assert learnt.advantages == close([0.2, -0.5 - 0.4, -0.3, -0.2, -0.6])
    assert learnt.targets == close([-0.5, -0.5, -1.0, -1.0, -1.0])
    update = learnt.policy_update(UNMOVED)
    assert update.loss == close(-(0.2 - 0.9 - 0.3 - 0.2 - 0.6) / 5)
    assert update.slopes == close([-0.2 / 5, 0.9 / 5, 0.3 / 5, 0.2 / 5, 0.6 / 5])
    assert "positive_nll" not in update.metrics


def test_the_other_kinds_of_kl_in_the_reward() -> None:
    """The log-ratios are Δ = 0.2, −0.4 | 0.4, 0.2, −0.2. Scores are not clipped, and β = 0.05."""
    expected = {
        "abs": [0.2, 0.4, 0.4, 0.2, 0.2],
        "k2": [0.02, 0.08, 0.08, 0.02, 0.02],
        "k3": [e**-0.2 - 0.8, e**0.4 - 1.4, e**-0.4 - 0.6, e**-0.2 - 0.8, e**0.2 - 1.2],
    }
    for kind, kl in expected.items():
        rewards = [-0.05 * each for each in kl]
        rewards[1] += 1.0
        rewards[4] -= 1.0
        assert learn("a2c", scores=[1.0, -1.0], kl_kind=kind).rewards == close(rewards), kind


def test_evpo() -> None:
    """With λ = 1 the advantage is G − V where the critic explains anything, else G less its mean over all tokens."""
    rewards = [-0.01, 0.02 + 1.0, -0.02, -0.01, 0.01 - 1.0]
    returns = [1.01, 1.02, -1.02, -1.0, -0.99]
    seeing = learn("evpo", scores=[1.0, -1.0])
    assert seeing.rewards == close(rewards)
    errors_of_it = [0.81, 0.62, -1.12, -0.8, -0.59]
    assert seeing.advantages == close(errors_of_it)
    # G − V: mean −1.08/5 = −0.216, squares 0.6561 + 0.3844 + 1.2544 + 0.64 + 0.3481 = 3.283
    assert seeing.estimates.explained_variance == close(1 - (3.283 / 5 - 0.216**2) / variance(returns))
    assert seeing.estimates.critic_weight == 1.0

    blind = learn("evpo", scores=[1.0, -1.0], values=[-value for value in VALUES])
    assert blind.estimates.explained_variance is not None
    assert blind.estimates.explained_variance < 0
    assert blind.estimates.critic_weight == 0.0
    mean = -0.98 / 5
    assert blind.advantages == close([each - mean for each in returns])
    assert blind.targets == close(returns), "the critic learns on, so that it may come back"

    a1, a2, b1, b2, b3 = errors_of_it
    later = seeing.policy_update(RATIOS)
    assert later.loss == close((-1.2 * a1 - 0.7 * a2 - 0.8 * b1 - 1.3 * b2 - 0.9 * b3) / 5)
    assert seeing.value_update(NEW_VALUES).loss == close(half_mean_square(errors(returns)))


def test_sao() -> None:
    """There is no KL, and λ_policy is 1 − 1/(1.5·2) = 2/3 and 1 − 1/(1.5·3) = 7/9. Both responses ended, so the values
    after their ends do not count."""
    learnt = learn("sao", scores=[1.0, -1.0], final_values=[9.0, 9.0])
    assert learnt.rewards == close([0.0, 1.0, 0.0, 0.0, -1.0])
    # δ = 0.2, 0.6 | −0.3, −0.2, −0.6
    a2, b3 = 0.6, -0.6
    a1, b2 = 0.2 + 2 / 3 * a2, -0.2 + 7 / 9 * b3
    b1 = -0.3 + 7 / 9 * b2
    assert learnt.advantages == close([a1, a2, b1, b2, b3])
    assert learnt.targets == close([1.0, 1.0, -1.0, -1.0, -1.0])

    # Inside (0.7, 6): 1.25, 0.75, 1.3. A clip would let 0.6 with A > 0 and 7 with A < 0 learn; all five count
    later = learnt.policy_update([1.25, 0.6, 0.75, 1.3, 7.0])
    logprobs = [-1.0 + log(1.25), -0.5 + log(0.75), -1.5 + log(1.3)]
    assert later.loss == close(
        -(1.25 * a1 * logprobs[0] + 0.75 * b1 * logprobs[1] + 1.3 * b2 * logprobs[2]) / 5
    )
    assert later.slopes == close([-1.25 * a1 / 5, 0.0, -0.75 * b1 / 5, -1.3 * b2 / 5, 0.0])
    assert later.metrics["clip_fraction"] == close(2 / 5)
    through = learn("sao", scores=[1.0, -1.0], final_values=[9.0, 9.0], ratio_mask_gradient=True)
    slopes = through.policy_update([1.25, 0.6, 0.75, 1.3, 7.0]).slopes
    assert slopes[0] == close(-1.25 * a1 * (1 + logprobs[0]) / 5)

    assert learnt.value_update(NEW_VALUES).loss == close(
        half_mean_square(errors([1.0, 1.0, -1.0, -1.0, -1.0]))
    )


def variance(numbers: list[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((number - mean) ** 2 for number in numbers) / len(numbers)
