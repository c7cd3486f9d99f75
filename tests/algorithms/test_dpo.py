import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.preference_loss import dpo


def random_pairs(seed):
    """Return log-probabilities of whole responses: chosen and rejected under the policy, then under the reference."""
    rng = np.random.default_rng(seed)
    return [-10 * rng.exponential(size=4) for _ in range(4)]


def test_by_hand():
    """The DPO loss and its metrics equal those worked out in the comment."""
    # β = 0.5. Pair 0: rewards ½·(ln 9) and 0, so σ = 3/4. Pair 1: 0 and ½·ln 9, so 1/4.
    log9 = math.log(9)
    tensors = [
        torch.tensor(values, dtype=torch.float64)
        for values in ([-1.0, -4.0], [-2.0, -5.0], [-1.0 - log9, -4.0], [-2.0, -5.0 - log9])
    ]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    result = dpo(*leaves, beta=0.5)
    assert result.loss.item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)
    assert result.pair_accuracy.mean() == 0.5
    assert result.reward_gap.sum.item() == pytest.approx(0, abs=1e-12) and result.reward_gap.count == 2
    # ∇ = −β·σ(−gap)/N on the chosen: −½·¼/2 and −½·¾/2, the opposite on the rejected, none on the reference.
    result.loss.backward()
    np.testing.assert_allclose(leaves[0].grad.numpy(), [-1 / 16, -3 / 16], rtol=1e-12)
    np.testing.assert_allclose(leaves[1].grad.numpy(), [1 / 16, 3 / 16], rtol=1e-12)
    assert leaves[2].grad is None and leaves[3].grad is None


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), beta=st.floats(0.01, 2))
def test_value_and_gradient_are_those_of_the_paper(seed, beta):
    # Eq. 7, and below it ∇ = −β·σ(r̂_rejected − r̂_chosen)·(∇log π(chosen) − ∇log π(rejected)), r̂ = β·log π/π_ref.
    arrays = random_pairs(seed)
    loss, slopes = 0.0, []
    for chosen, rejected, ref_chosen, ref_rejected in zip(*arrays, strict=True):
        gap = beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected)
        loss += (math.log1p(math.exp(-abs(gap))) + max(-gap, 0)) / 4
        wrongness = 1 / (1 + math.exp(min(gap, 700)))
        slopes.append(-beta * wrongness / 4)
    chosen, rejected = (torch.tensor(array, requires_grad=True) for array in arrays[:2])
    result = dpo(chosen, rejected, *(torch.tensor(array) for array in arrays[2:]), beta=beta)
    assert result.loss.item() == pytest.approx(loss, rel=1e-10)
    gradients = torch.autograd.grad(result.loss, (chosen, rejected))
    np.testing.assert_allclose(gradients[0].numpy(), slopes, rtol=1e-8)
    np.testing.assert_allclose(gradients[1].numpy(), np.negative(slopes), rtol=1e-8)


def test_its_optimum_is_the_reference_tilted_by_the_reward():
    """The optimum of the DPO loss is the reference weighted by e^(r/β), as the paper derives."""
    # Eq. 4-5: if π ∝ π_ref·e^(r/β), the implicit rewards' differences are r's, so DPO is Bradley-Terry on r.
    beta, rewards = 0.7, np.array([1.0, -0.5, 2.0])
    reference = np.array([0.2, 0.5, 0.3])
    policy = reference * np.exp(rewards / beta)
    policy /= policy.sum()
    chosen, rejected = np.array([0, 2, 2]), np.array([1, 0, 1])
    result = dpo(
        *(torch.tensor(np.log(p[i])) for p, i in ((policy, chosen), (policy, rejected))),
        *(torch.tensor(np.log(p[i])) for p, i in ((reference, chosen), (reference, rejected))),
        beta=beta,
    )
    gaps = rewards[chosen] - rewards[rejected]
    assert result.reward_gap.sum.item() == pytest.approx(gaps.sum(), rel=1e-10)
    assert result.loss.item() == pytest.approx(np.log1p(np.exp(-gaps)).mean(), rel=1e-10)
    assert result.pair_accuracy.mean() == 1


def test_a_policy_equal_to_its_reference_starts_at_log_2_and_ranks_nothing():
    logprobs = torch.tensor([-3.0, -200.0])
    result = dpo(logprobs, 2 * logprobs, logprobs, 2 * logprobs, beta=0.1)
    assert result.loss.item() == pytest.approx(math.log(2))
    assert result.pair_accuracy.mean() == 0 and result.reward_gap.mean() == 0


def test_hopeless_pairs_and_half_precision_stay_finite_and_exact():
    chosen = torch.tensor([-3000.0], requires_grad=True)
    result = dpo(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), beta=0.5)
    assert result.loss.item() == 1500
    assert torch.autograd.grad(result.loss, chosen)[0].item() == -0.5
    # Widened before anything is computed: in bfloat16 a product with β = 0.1 keeps only two or three digits.
    half = [torch.tensor([value]).bfloat16() for value in (-100.5, -64.0, -100.0, -64.5)]
    result = dpo(*half, beta=0.1)
    widened = [tensor.double().item() for tensor in half]
    expected = 0.1 * ((widened[0] - widened[2]) - (widened[1] - widened[3]))
    assert result.loss.dtype == torch.float32
    assert result.reward_gap.mean() == pytest.approx(expected, rel=1e-6)


def test_an_empty_micro_batch_gives_0_and_an_empty_minibatch_is_refused():
    nothing = torch.zeros(0, requires_grad=True)
    result = dpo(nothing, nothing, nothing, nothing, beta=0.1, denominator=8)
    assert result.loss == 0 and torch.autograd.grad(result.loss, nothing)[0].shape == (0,)
    with pytest.raises(ValueError, match="no pair"):
        dpo(nothing, nothing, nothing, nothing, beta=0.1)


def test_refusals():
    """Wrong arguments of the DPO loss are refused by message."""
    two, three = torch.zeros(2), torch.zeros(3)
    for beta in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=f"beta={beta} is not positive"):
            dpo(two, two, two, two, beta=beta)
    with pytest.raises(ValueError, match=r"ref_chosen_logprobs has shape \(3,\); it must be \(2,\)"):
        dpo(two, two, three, two, beta=0.1)
    with pytest.raises(ValueError, match=r"rejected_logprobs has shape \(3,\); it must be \(2,\)"):
        dpo(two, three, two, two, beta=0.1)
    with pytest.raises(ValueError, match=r"ref_rejected_logprobs has shape \(3,\); it must be \(2,\)"):
        dpo(two, two, two, three, beta=0.1)
    with pytest.raises(ValueError, match=r"chosen_logprobs has shape \(2, 1\); it must be \(N,\)"):
        dpo(two[:, None], two, two[:, None], two, beta=0.1)
