import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.policy_loss import (
    clipped_surrogate,
    masked_ratio_gradient,
    policy_gradient,
    positive_example_nll,
)

seeds = st.integers(0, 2**32 - 1)
ranges = st.one_of(st.none(), st.floats(0.01, 1.0))


def surrogate_by_definition(logprobs, old_logprobs, advantages, mask, low, high, dual):
    """Return loss and gradient with respect to logprobs by token mean, one token at a time."""
    num_tokens = sum(sum(row) for row in mask.tolist())
    loss, num_clipped, num_dual_clipped, gradient = 0.0, 0, 0, np.zeros(mask.shape)
    for row, t in zip(*np.nonzero(mask), strict=True):
        ratio, advantage = math.exp(logprobs[row, t] - old_logprobs[row, t]), advantages[row, t]
        clipped = min(max(ratio, 1 - low if low else 0.0), 1 + high if high else math.inf)
        per_token = max(-ratio * advantage, -clipped * advantage)
        dual_binds = dual is not None and advantage < 0 and per_token > -dual * advantage
        loss += (-dual * advantage if dual_binds else per_token) / num_tokens
        if dual_binds:
            num_dual_clipped += 1
        elif clipped * advantage < ratio * advantage:
            num_clipped += 1  # the clipped term is the smaller one, and a constant
        else:
            gradient[row, t] = -ratio * advantage / num_tokens
    return loss, gradient, num_clipped, num_dual_clipped


def random_batch(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((rng.integers(1, 6), rng.integers(1, 8))) < 0.7
    mask[0, 0] = True
    old = np.where(mask, -rng.exponential(size=mask.shape), math.nan)
    logprobs = np.where(mask, old + rng.normal(scale=0.5, size=mask.shape), math.nan)
    return logprobs, old, np.where(mask, rng.normal(size=mask.shape), math.nan), mask


@settings(max_examples=80)
@given(seed=seeds, low=ranges, high=ranges, dual=st.one_of(st.none(), st.floats(1.01, 3.0)))
def test_value_gradient_and_clip_counts_are_the_definition(seed, low, high, dual):
    logprobs, old, advantages, mask = random_batch(seed)
    leaf = torch.tensor(logprobs, requires_grad=True)
    result = clipped_surrogate(
        leaf,
        torch.tensor(old),
        torch.tensor(advantages),
        torch.tensor(mask),
        clip_range_low=low,
        clip_range_high=high,
        dual_clip=dual,
        aggregation="token",
    )
    loss, gradient, num_clipped, num_dual_clipped = surrogate_by_definition(
        logprobs, old, advantages, mask, low, high, dual
    )
    assert result.loss.item() == pytest.approx(loss, rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(
        torch.autograd.grad(result.loss, leaf)[0].numpy(), gradient, rtol=1e-10, atol=1e-14
    )
    assert (result.clip_fraction.sum.item(), result.clip_fraction.count.item()) == (num_clipped, mask.sum())
    assert result.dual_clip_fraction.sum == num_dual_clipped
    assert result.dual_clip_fraction.count == mask.sum()


def test_by_hand_with_clip_higher():
    # ε_low 0.2, ε_high 0.28. One token for each side of each sign:
    #   ρ = 1.5, A = +2: min(3.0, 1.28·2)    =  2.56, clipped
    #   ρ = 1.5, A = −2: min(−3.0, −2.56)    = −3.0
    #   ρ = 0.5, A = +2: min(1.0, 0.8·2)     =  1.0
    #   ρ = 0.5, A = −2: min(−1.0, −1.6)     = −1.6, clipped
    #   ρ = 1.25, A = +2: inside the range   =  2.5
    # Loss −(2.56 − 3 + 1 − 1.6 + 2.5)/5 = −1.46/5 = −0.292.
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.25]], dtype=torch.float64)
    leaf = ratio.log().requires_grad_()
    result = clipped_surrogate(
        leaf,
        torch.zeros(1, 5, dtype=torch.float64),
        torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]], dtype=torch.float64),
        torch.ones(1, 5).bool(),
        clip_range_low=0.2,
        clip_range_high=0.28,
        aggregation="token",
    )
    assert result.loss.item() == pytest.approx(-0.292)
    assert result.clip_fraction.mean() == pytest.approx(2 / 5)
    assert result.ratio.mean() == pytest.approx((1.5 + 1.5 + 0.5 + 0.5 + 1.25) / 5)
    # KL(old‖new) by ρ − 1 − ln ρ.
    assert result.approx_kl.sum.item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratio[0].tolist()))
    # Gradient −ρA/5 where the clip does not bind.
    gradient = torch.autograd.grad(result.loss, leaf)[0]
    np.testing.assert_allclose(gradient.numpy(), [[0, 3 / 5, -1 / 5, 0, -2.5 / 5]])


def test_dual_clip_by_hand():
    # ε 0.2, c = 3. min(max(−ρA, −clip(ρ)A), −cA) where A < 0; A > 0 knows no c:
    #   ρ = 4,   A = −2: min(max(8, 2.4), 6)     = 6, dual-clipped
    #   ρ = 2,   A = −2: min(max(4, 2.4), 6)     = 4
    #   ρ = 0.5, A = −2: min(max(1, 1.6), 6)     = 1.6, clipped
    #   ρ = 4,   A = +2: max(−8, −2.4)           = −2.4, clipped
    #   ρ = 0.5, A = +2: max(−1, −1.6)           = −1
    # Gradient −ρA/5 where nothing binds.
    ratio = torch.tensor([[4.0, 2.0, 0.5, 4.0, 0.5]], dtype=torch.float64)
    advantages = torch.tensor([[-2.0, -2.0, -2.0, 2.0, 2.0]], dtype=torch.float64)
    leaf = ratio.log().requires_grad_()
    result = clipped_surrogate(
        leaf,
        torch.zeros_like(ratio),
        advantages,
        ratio > 0,
        clip_range_low=0.2,
        clip_range_high=0.2,
        dual_clip=3.0,
        aggregation="token",
    )
    assert result.loss.item() == pytest.approx((6 + 4 + 1.6 - 2.4 - 1) / 5)
    assert (result.dual_clip_fraction.sum.item(), result.clip_fraction.sum.item()) == (1, 2)
    np.testing.assert_allclose(
        torch.autograd.grad(result.loss, leaf)[0].numpy(), [[0, 4 / 5, 0, 0, -1 / 5]], rtol=1e-12
    )


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_dual_clip_takes_an_overflowing_ratio_out_of_value_and_gradient(clip_range):
    # log ρ = 200 overflows float32. A < 0: at most 3·2; A = 0: nothing. The last token keeps its own.
    leaf = torch.tensor([[0.0, 0.0, -1.0]], requires_grad=True)
    result = clipped_surrogate(
        leaf,
        torch.tensor([[-200.0, -200.0, -1.0]]),
        torch.tensor([[-2.0, 0.0, 3.0]]),
        torch.ones(1, 3).bool(),
        clip_range_low=clip_range,
        clip_range_high=clip_range,
        dual_clip=3.0,
        aggregation="token",
    )
    assert result.loss.item() == pytest.approx((6 + 0 - 3) / 3)
    assert torch.autograd.grad(result.loss, leaf)[0].tolist() == [[0.0, 0.0, -1.0]]
    assert (result.dual_clip_fraction.sum.item(), result.clip_fraction.sum.item()) == (1, 0)


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0, math.nan])
def test_a_dual_clip_that_would_bind_everywhere_is_refused(dual_clip):
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match=f"dual_clip={dual_clip} is not above 1.*None turns it off"):
        clipped_surrogate(
            ones,
            ones,
            ones,
            ones.bool(),
            clip_range_low=0.2,
            clip_range_high=0.2,
            dual_clip=dual_clip,
            aggregation="token",
        )


def test_at_ratio_1_the_gradient_is_the_plain_policy_gradient():
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    advantages = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(4) < torch.tensor([4, 2, 1])[:, None]
    leaf = logprobs.clone().requires_grad_()
    result = clipped_surrogate(
        leaf, logprobs, advantages, mask, clip_range_low=0.2, clip_range_high=0.2, aggregation="token"
    )
    plain = -(leaf * advantages)[mask].mean()
    expected = torch.autograd.grad(plain, leaf)[0]
    assert torch.allclose(torch.autograd.grad(result.loss, leaf)[0], expected, rtol=1e-14)
    without_ratio = policy_gradient(leaf, logprobs, advantages, mask, aggregation="token")
    assert torch.allclose(torch.autograd.grad(without_ratio.loss, leaf)[0], expected, rtol=1e-14)
    assert result.ratio.mean() == 1
    assert result.approx_kl.sum == 0 and result.clip_fraction.sum == 0


def test_the_clip_takes_nothing_from_a_token_without_advantage():
    ratio, zeros = torch.tensor([[0.5, 1.0, 2.0]]), torch.zeros(1, 3)
    result = clipped_surrogate(
        ratio.log(),
        zeros,
        zeros,
        zeros == 0,
        clip_range_low=0.2,
        clip_range_high=0.2,
        aggregation="token",
    )
    assert result.loss == 0 and result.clip_fraction.sum == 0


def test_gradient_by_finite_differences():
    logprobs, old, advantages, mask = (torch.tensor(array) for array in random_batch(11))
    dense = [torch.where(mask, tensor, -0.5) for tensor in (logprobs, old, advantages)]

    def loss(leaf):
        return clipped_surrogate(
            leaf, dense[1], dense[2], mask, clip_range_low=0.2, clip_range_high=0.3, aggregation="sequence"
        ).loss

    assert torch.autograd.gradcheck(loss, dense[0].requires_grad_())


def test_an_overflowing_ratio_is_clipped_without_a_nan_in_the_gradient():
    # log ρ = 200 overflows float32. A > 0: clipped to 1.2·A, gradient 0. The other token keeps its own.
    leaf = torch.tensor([[0.0, -1.0]], requires_grad=True)
    result = clipped_surrogate(
        leaf,
        torch.tensor([[-200.0, -1.0]]),
        torch.tensor([[1.0, 3.0]]),
        torch.ones(1, 2).bool(),
        clip_range_low=0.2,
        clip_range_high=0.2,
        aggregation="token",
    )
    assert result.loss.item() == pytest.approx(-(1.2 + 3) / 2)
    assert torch.autograd.grad(result.loss, leaf)[0].tolist() == [[0.0, -1.5]]


@settings(max_examples=80)
@given(seed=seeds, low=ranges, high=st.one_of(st.none(), st.floats(0.01, 5.0)), through_ratio=st.booleans())
def test_the_masked_ratio_is_its_definition_token_by_token(seed, low, high, through_ratio):
    logprobs, old, advantages, mask = random_batch(seed)
    leaf = torch.tensor(logprobs, requires_grad=True)
    result = masked_ratio_gradient(
        leaf,
        torch.tensor(old),
        torch.tensor(advantages),
        torch.tensor(mask),
        clip_range_low=low,
        clip_range_high=high,
        through_ratio=through_ratio,
        aggregation="token",
    )
    loss, left_out, gradient = 0.0, 0, np.zeros(mask.shape)
    for row, t in zip(*np.nonzero(mask), strict=True):
        ratio, advantage = math.exp(logprobs[row, t] - old[row, t]), advantages[row, t]
        if (low is not None and ratio <= 1 - low) or (high is not None and ratio >= 1 + high):
            left_out += 1
            continue
        loss -= ratio * advantage * logprobs[row, t] / mask.sum()
        moved = ratio * (1 + logprobs[row, t]) if through_ratio else ratio
        gradient[row, t] = -moved * advantage / mask.sum()
    assert result.loss.item() == pytest.approx(loss, rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(
        torch.autograd.grad(result.loss, leaf)[0].numpy(), gradient, rtol=1e-10, atol=1e-14
    )
    assert (result.clip_fraction.sum.item(), result.clip_fraction.count.item()) == (left_out, mask.sum())
    assert result.dual_clip_fraction.sum == 0


def test_the_masked_ratio_by_hand():
    # ε 0.3 and 5.0: ρ of 0.7 and 6 are on the open interval's ends, 0.5 and 8 beyond; all four are left out,
    # whatever the advantage's sign, and still counted: loss −(1.5·2·ln 1.5 − 3·ln 3)/6.
    ratio = torch.tensor([[0.7, 6.0, 0.5, 8.0, 1.5, 3.0]], dtype=torch.float64)
    leaf = ratio.log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
    result = masked_ratio_gradient(
        leaf,
        torch.zeros_like(ratio),
        advantages,
        torch.ones(1, 6).bool(),
        clip_range_low=0.3,
        clip_range_high=5.0,
        through_ratio=False,
        aggregation="token",
    )
    assert result.loss.item() == pytest.approx(-(3.0 * math.log(1.5) - 3.0 * math.log(3.0)) / 6)
    gradient = torch.autograd.grad(result.loss, leaf)[0]
    assert gradient[0].tolist() == pytest.approx([0, 0, 0, 0, -3.0 / 6, 3.0 / 6])
    assert (result.clip_fraction.sum, result.clip_fraction.count) == (4, 6)


def test_inside_its_range_the_masked_ratio_has_the_surrogates_gradient():
    logprobs, old, advantages, mask = (torch.tensor(part) for part in random_batch(7))
    gradients = []
    for loss, options in ((clipped_surrogate, {}), (masked_ratio_gradient, {"through_ratio": False})):
        leaf = logprobs.clone().requires_grad_()
        result = loss(
            leaf,
            old,
            advantages,
            mask,
            clip_range_low=None,
            clip_range_high=None,
            aggregation="token",
            **options,
        )
        gradients.append(torch.autograd.grad(result.loss, leaf)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("through_ratio", [False, True])
def test_a_masked_ratio_that_overflows_is_left_out_and_no_nan_is_hidden(through_ratio):
    mask = torch.ones(1, 2).bool()
    options = {"clip_range_low": 0.3, "clip_range_high": 5.0, "aggregation": "token"}
    options["through_ratio"] = through_ratio
    leaf = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss = masked_ratio_gradient(leaf, torch.tensor([[-500.0, -1.0]]), torch.ones(1, 2), mask, **options).loss
    assert torch.autograd.grad(loss, leaf)[0].isfinite().all()
    for position in range(3):
        tensors = [torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)]
        tensors[position][0, 1] = math.nan
        assert math.isnan(masked_ratio_gradient(*tensors, mask, **options).loss)


def test_policy_gradient_by_hand():
    # −log π·A: rows (1·2 + 2·2) and 3·(−1), summed over each and averaged over both: (6 − 3)/2 = 1.5. ρ is e^½
    # on the first token and 1 on the others, and is in the metrics alone.
    leaf = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.5, -2.0], [-3.0, math.inf]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0, 2.0], [-1.0, math.nan]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    result = policy_gradient(leaf, old, advantages, mask, aggregation="sequence_sum")
    assert result.loss.item() == pytest.approx(1.5)
    assert result.ratio.mean() == pytest.approx((math.exp(0.5) + 2) / 3)
    assert result.approx_kl.mean() == pytest.approx((math.exp(0.5) - 1.5) / 3)
    for fraction in (result.clip_fraction, result.dual_clip_fraction):
        assert (fraction.sum.item(), fraction.count.item()) == (0, 3)
    result.loss.backward()
    assert leaf.grad.tolist() == [[-1.0, -1.0], [0.5, 0.0]]
    assert old.grad is None and advantages.grad is None


def test_policy_gradient_is_reinforce_in_expectation():
    # One token from three, probabilities (½, ¼, ¼): the rows 0, 0, 1, 2 are its expectation. The gradient of
    # the loss is that of −E[R], by differentiating E[R] = Σ_v π(v)·R(v) itself.
    logits = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log().requires_grad_()
    rewards, tokens = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64), torch.tensor([[0], [0], [1], [2]])
    logprobs = torch.log_softmax(logits, 0)[tokens]
    loss = policy_gradient(
        logprobs, logprobs.detach(), rewards[tokens], torch.ones(4, 1).bool(), aggregation="sequence_sum"
    ).loss
    expected = torch.autograd.grad(-(torch.softmax(logits, 0) @ rewards), logits)[0]
    np.testing.assert_allclose(torch.autograd.grad(loss, logits)[0].numpy(), expected.numpy(), rtol=1e-12)


def test_policy_gradient_hides_no_nan_and_refuses_shapes_and_empty_masks():
    ones, mask = torch.ones(1, 2), torch.ones(1, 2).bool()
    broken = torch.tensor([[0.0, math.nan]])
    assert policy_gradient(broken, ones, ones, mask, aggregation="token").loss.isnan()
    assert policy_gradient(ones, ones, broken, mask, aggregation="token").loss.isnan()
    with pytest.raises(ValueError, match=r"advantages has shape \(1, 3\); it must be \(1, 2\)"):
        policy_gradient(ones, ones, torch.ones(1, 3), mask, aggregation="token")
    with pytest.raises(ValueError, match="response_mask has no True element"):
        policy_gradient(ones, ones, ones, ~mask, aggregation="token")


def test_a_nan_at_a_response_token_is_not_hidden():
    mask = torch.ones(1, 2).bool()
    for position in range(3):
        tensors = [torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)]
        tensors[position][0, 1] = math.nan
        loss = clipped_surrogate(
            *tensors, mask, clip_range_low=0.2, clip_range_high=0.2, aggregation="token"
        ).loss
        assert math.isnan(loss)


def test_only_the_new_logprobs_get_a_gradient():
    logprobs, old, advantages = (torch.zeros(1, 2, requires_grad=True) for _ in range(3))
    clipped_surrogate(
        logprobs,
        old,
        advantages,
        torch.ones(1, 2).bool(),
        clip_range_low=None,
        clip_range_high=None,
        aggregation="token",
    ).loss.backward()
    assert logprobs.grad is not None and old.grad is None and advantages.grad is None


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (0.0, 0.2, "clip_range_low=0.0 is not positive; use None"),
        (0.2, -0.1, "clip_range_high=-0.1 is not positive; use None"),
        (1.5, 0.2, "clip_range_low=1.5 is above 1, where it clips nothing"),
    ],
)
def test_clip_ranges_are_refused_by_name(low, high, message):
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match=message):
        clipped_surrogate(
            ones, ones, ones, ones.bool(), clip_range_low=low, clip_range_high=high, aggregation="token"
        )


def test_positive_example_nll_by_hand():
    # Correct: rows 0 and 2, with 2 + 1 tokens: (1 + 2 + 6)/3 = 3. Row 1 is wrong; its logprobs are garbage.
    leaf = torch.tensor(
        [[-1.0, -2.0, math.nan], [math.nan, -9.0, math.inf], [-6.0, math.nan, 1.0]], requires_grad=True
    )
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    result = positive_example_nll(leaf, mask, torch.tensor([True, False, True]))
    assert result.loss.item() == pytest.approx(3)
    assert (result.positive_nll.sum.item(), result.positive_nll.count.item()) == (9, 3)
    third = pytest.approx(-1 / 3)
    assert torch.autograd.grad(result.loss, leaf)[0].tolist() == [[third, third, 0], [0, 0, 0], [third, 0, 0]]


@pytest.mark.parametrize("denominator", [None, 0, 12, torch.tensor(0)])
def test_no_correct_response_gives_0_and_a_zero_gradient(denominator):
    leaf = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    result = positive_example_nll(leaf, mask, torch.tensor([False]), denominator=denominator)
    assert result.loss.item() == 0 and math.isnan(result.positive_nll.mean())
    assert torch.autograd.grad(result.loss, leaf)[0].tolist() == [[0.0, 0.0]]


def test_positive_example_nll_refusals():
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"denominator=0.0 is not positive"):
        positive_example_nll(logprobs, mask, torch.tensor([True, False]), denominator=0)
    with pytest.raises(TypeError, match=r"is_positive has dtype torch.float32"):
        positive_example_nll(logprobs, mask, torch.ones(2))
    with pytest.raises(ValueError, match=r"is_positive has shape \(3,\); it must be \(2,\)"):
        positive_example_nll(logprobs, mask, torch.ones(3).bool())
