import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.advantages import (
    gae,
    length_adaptive_lambda,
    monte_carlo_returns,
    returns_to_go,
    whiten,
)

seeds = st.integers(0, 2**32 - 1)
unit = st.floats(0, 1)


def random_batch(seed):
    """Return rewards, values, mask (gaps and empty rows too), λ and final value per row; NaN under the mask."""
    rng = np.random.default_rng(seed)
    num_rows, width = rng.integers(1, 6), rng.integers(1, 10)
    mask = torch.tensor(rng.random((num_rows, width)) < 0.7)
    rewards, values = (torch.tensor(rng.normal(size=(num_rows, width))) for _ in range(2))
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    lam, final_values = torch.tensor(rng.random(num_rows)), torch.tensor(rng.normal(size=num_rows))
    return torch.where(mask, rewards, nan), torch.where(mask, values, nan), mask, lam, final_values


def gae_by_definition(rewards, values, mask, gamma, lam, final_values):
    """Return A_t = Σ_{k ≥ t} (γλ)^(k−t) δ_k, as an O(T²) sum over a row whose masked positions are deleted."""
    advantages = np.zeros(mask.shape)
    for row in range(mask.shape[0]):
        kept = [t for t in range(mask.shape[1]) if mask[row, t]]
        v = [float(values[row, t]) for t in kept] + [float(final_values[row])]
        delta = [float(rewards[row, t]) + gamma * v[i + 1] - v[i] for i, t in enumerate(kept)]
        for i, t in enumerate(kept):
            decay = gamma * float(lam[row])
            advantages[row, t] = sum(decay ** (k - i) * delta[k] for k in range(i, len(kept)))
    return advantages


@settings(max_examples=60)
@given(seed=seeds, gamma=unit)
def test_gae_is_its_definition_for_any_mask_lambda_per_row_and_final_value(seed, gamma):
    rewards, values, mask, lam, final_values = random_batch(seed)
    measured = gae(rewards, values, mask, gamma=gamma, lam=lam, final_values=final_values)
    expected = gae_by_definition(rewards, values, mask, gamma, lam, final_values)
    np.testing.assert_allclose(measured.numpy(), expected, rtol=1e-10, atol=1e-12)


def test_gae_by_hand():
    """The advantages of GAE equal those worked out in the comments."""
    # γ = 0.5, λ = 0.5, so γλ = 0.25; three tokens, then a pad. The value after the last token is 0.
    #   δ_2 = 4 + 0.5·0 − 2 = 2          A_2 = 2
    #   δ_1 = 0 + 0.5·2 − 3 = −2         A_1 = −2 + 0.25·2 = −1.5
    #   δ_0 = 1 + 0.5·3 − 1 = 1.5        A_0 = 1.5 + 0.25·(−1.5) = 1.125
    rewards, values = torch.tensor([[1.0, 0.0, 4.0, 0.0]]), torch.tensor([[1.0, 3.0, 2.0, 99.0]])
    mask = torch.tensor([[True, True, True, False]])
    assert gae(rewards, values, mask, gamma=0.5, lam=0.5).tolist() == [[1.125, -1.5, 2.0, 0.0]]
    # Truncated, worth 8 more:
    #   A_2 = δ_2 = 4 + 0.5·8 − 2 = 6, A_1 = −2 + 0.25·6 = −0.5, A_0 = 1.5 + 0.25·(−0.5) = 1.375
    truncated = gae(rewards, values, mask, gamma=0.5, lam=0.5, final_values=torch.tensor([8.0]))
    assert truncated.tolist() == [[1.375, -0.5, 6.0, 0.0]]


def test_gae_steps_over_a_gap_as_if_it_were_deleted():
    # The response of the test by hand, with a masked token after its first and its second.
    nan = float("nan")
    rewards = torch.tensor([[1.0, nan, 0.0, nan, 4.0]])
    values = torch.tensor([[1.0, nan, 3.0, -7.0, 2.0]])
    mask = torch.tensor([[True, False, True, False, True]])
    assert gae(rewards, values, mask, gamma=0.5, lam=0.5).tolist() == [[1.125, 0.0, -1.5, 0.0, 2.0]]


@settings(max_examples=30)
@given(seed=seeds, gamma=unit)
def test_lambda_0_gives_the_temporal_difference_error(seed, gamma):
    rewards, values, mask, _, final_values = random_batch(seed)
    measured = gae(rewards, values, mask, gamma=gamma, lam=0.0, final_values=final_values)
    for row in range(mask.shape[0]):
        next_value = final_values[row]
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            assert measured[row, t] == rewards[row, t] + gamma * next_value - values[row, t]
            next_value = values[row, t]


@settings(max_examples=30)
@given(seed=seeds)
def test_gamma_and_lambda_1_give_return_minus_value(seed):
    rewards, values, mask, _, _ = random_batch(seed)
    measured = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    for row in range(mask.shape[0]):
        for t in mask[row].nonzero().flatten().tolist():
            to_go = sum(rewards[row, k].item() for k in range(t, mask.shape[1]) if mask[row, k])
            assert measured[row, t].item() == pytest.approx(to_go - values[row, t].item(), abs=1e-12)


@settings(max_examples=30)
@given(seed=seeds, gamma=unit)
def test_lambda_per_row_equals_a_scalar_for_each_row(seed, gamma):
    rewards, values, mask, lam, _ = random_batch(seed)
    together = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(mask.shape[0]):
        one = slice(row, row + 1)
        alone = gae(rewards[one], values[one], mask[one], gamma=gamma, lam=lam[row].item())
        assert torch.equal(together[one], alone)


@settings(max_examples=30)
@given(seed=seeds, gamma=unit)
def test_masked_content_padding_and_row_order_change_nothing(seed, gamma):
    rewards, values, mask, lam, final_values = random_batch(seed)
    expected = gae(rewards, values, mask, gamma=gamma, lam=lam, final_values=final_values)
    assert (expected[~mask] == 0).all()

    other_rewards, other_values = torch.where(mask, rewards, -math.inf), torch.where(mask, values, 1e30)
    other = gae(other_rewards, other_values, mask, gamma=gamma, lam=lam, final_values=final_values)
    assert torch.equal(other, expected)

    def pad(tensor, filler):
        return torch.nn.functional.pad(tensor, (0, 3), value=filler)

    padded = gae(
        pad(rewards, math.nan),
        pad(values, math.nan),
        pad(mask, False),
        gamma=gamma,
        lam=lam,
        final_values=final_values,
    )
    assert torch.equal(padded, pad(expected, 0.0))

    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    permuted = gae(
        rewards[order],
        values[order],
        mask[order],
        gamma=gamma,
        lam=lam[order],
        final_values=final_values[order],
    )
    assert torch.equal(permuted, expected[order])


def test_advantages_pass_no_gradient_and_leave_their_inputs_alone():
    rewards, values = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert not gae(rewards, values, mask, gamma=1.0, lam=0.9, final_values=values[:, 0]).requires_grad
    assert not monte_carlo_returns(rewards, mask, gamma=1.0).requires_grad
    assert not whiten(values, mask).requires_grad
    assert torch.equal(rewards, torch.ones(2, 3)) and torch.equal(values, torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_advantages_come_in_float32_or_better(dtype):
    ones, mask = torch.ones(1, 2, dtype=dtype), torch.ones(1, 2, dtype=torch.bool)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert gae(ones, ones, mask, gamma=1.0, lam=1.0).dtype == expected
    assert monte_carlo_returns(ones, mask, gamma=1.0).dtype == expected
    assert whiten(ones, mask).dtype == expected


def test_float32_keeps_a_long_response_accurate():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(1, 300)), rng.normal(size=(1, 300))
    mask = torch.ones(1, 300, dtype=torch.bool)
    single = gae(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(values, dtype=torch.float32),
        mask,
        gamma=1.0,
        lam=0.99,
    )
    expected = gae_by_definition(rewards, values, mask, 1.0, [0.99], [0.0])
    np.testing.assert_allclose(single.numpy(), expected, atol=2e-4)


by_both_names = pytest.mark.parametrize(
    "returns", [monte_carlo_returns, returns_to_go], ids=lambda returns: returns.__name__
)


@by_both_names
def test_returns_by_hand(returns):
    """Returns equal those worked out in the comment, also around a masked token."""
    # γ = 0.5, one masked token in the middle: G_3 = 4, G_1 = 2 + 0.5·4 = 4, G_0 = 1 + 0.5·4 = 3.
    rewards = torch.tensor([[1.0, 2.0, float("nan"), 4.0]])
    mask = torch.tensor([[True, True, False, True]])
    assert returns(rewards, mask, gamma=0.5).tolist() == [[3.0, 4.0, 0.0, 4.0]]


@by_both_names
@settings(max_examples=30)
@given(seed=seeds, gamma=unit)
def test_returns_are_the_discounted_sum(returns, seed, gamma):
    rewards, _, mask, _, _ = random_batch(seed)
    measured = returns(rewards, mask, gamma=gamma)
    for row in range(mask.shape[0]):
        kept = mask[row].nonzero().flatten().tolist()
        for i, t in enumerate(kept):
            expected = sum(gamma**k * rewards[row, later].item() for k, later in enumerate(kept[i:]))
            assert measured[row, t].item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_a_reward_outside_the_mask_is_refused():
    mask = torch.tensor([[True, True], [True, False]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 2.5]])
    with pytest.raises(ValueError, match=r"rewards\[1, 1\] = 2.5 lies outside response_mask"):
        gae(rewards, torch.zeros(2, 2), mask, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="lies outside response_mask"):
        monte_carlo_returns(rewards, mask, gamma=1.0)


def test_settings_and_shapes_are_refused_by_name():
    ones, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"gamma=1.5 is outside \[0, 1\]"):
        gae(ones, ones, mask, gamma=1.5, lam=1.0)
    with pytest.raises(ValueError, match=r"lam=-0.1 is outside \[0, 1\]"):
        gae(ones, ones, mask, gamma=1.0, lam=-0.1)
    with pytest.raises(ValueError, match=r"lam=.*nan.* is outside \[0, 1\]"):
        gae(ones, ones, mask, gamma=1.0, lam=torch.tensor([0.5, math.nan]))
    with pytest.raises(ValueError, match=r"lam has shape \(3,\); it must be \(2,\)"):
        gae(ones, ones, mask, gamma=1.0, lam=torch.full((3,), 0.5))
    with pytest.raises(ValueError, match=r"final_values has shape \(1,\); it must be \(2,\)"):
        gae(ones, ones, mask, gamma=1.0, lam=1.0, final_values=torch.zeros(1))
    with pytest.raises(ValueError, match=r"values has shape \(2, 4\); it must be \(2, 3\)"):
        gae(ones, torch.ones(2, 4), mask, gamma=1.0, lam=1.0)


def test_length_adaptive_lambda_by_hand():
    # α = 0.05 clamps below 20 tokens: 1/(0.05·10) = 2. At 20: 1 − 1 = 0. At 40: 1 − 1/2. At 100: 1 − 1/5.
    lam = length_adaptive_lambda(torch.tensor([0, 3, 8, 10, 20, 40, 100]), alpha=0.05)
    np.testing.assert_allclose(lam.numpy(), [0, 0, 0, 0, 0, 0.5, 0.8], atol=1e-6)
    # α = 1: λ = 1 − 1/l.
    lam = length_adaptive_lambda(torch.tensor([1, 2, 5, 50]), alpha=1.0)
    np.testing.assert_allclose(lam.numpy(), [0, 0.5, 0.8, 0.98], atol=1e-6)


@settings(max_examples=30)
@given(length=st.integers(1, 5000), alpha=st.floats(0.01, 5.0))
def test_length_adaptive_lambda_spreads_over_alpha_times_length_tokens(length, alpha):
    # VAPO eq. 4: Σ_{t ≥ 0} λ^t = 1/(1 − λ) = alpha · length, wherever the clamp leaves it free.
    lam = length_adaptive_lambda(torch.tensor([float(length)], dtype=torch.float64), alpha=alpha).item()
    if alpha * length > 1:
        assert 1 / (1 - lam) == pytest.approx(alpha * length, rel=1e-6)
    else:
        assert lam == 0


def test_length_adaptive_lambda_refuses_what_has_no_meaning():
    with pytest.raises(ValueError, match="alpha=0 is not positive"):
        length_adaptive_lambda(torch.tensor([5]), alpha=0)
    with pytest.raises(ValueError, match="lengths has -1"):
        length_adaptive_lambda(torch.tensor([5, -1]), alpha=1.0)


def test_whiten_by_hand():
    """Whitened advantages equal those worked out in the comment."""
    # Valid: 1, 3, 5, 7. Mean 4; variance (9 + 1 + 1 + 9)/4 = 5.
    advantages = torch.tensor([[1.0, 3.0, math.nan], [5.0, 7.0, math.inf]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    expected = np.array([[-3, -1, 0], [1, 3, 0]]) / math.sqrt(5)
    np.testing.assert_allclose(whiten(advantages, mask).numpy(), expected, rtol=1e-7)


@settings(max_examples=30)
@given(seed=seeds)
def test_whitened_advantages_have_mean_0_and_standard_deviation_1(seed):
    _, advantages, mask, _, _ = random_batch(seed)
    valid = advantages[mask].numpy()
    if valid.size == 0:
        return
    measured = whiten(advantages, mask)
    expected = (valid - valid.mean()) / (valid.std() + 1e-8)
    np.testing.assert_allclose(measured[mask].numpy(), expected, rtol=1e-6, atol=1e-9)
    assert (measured[~mask] == 0).all()


def test_equal_advantages_whiten_to_0_also_where_rounding_blurs_their_mean():
    mask = torch.ones(7, 11, dtype=torch.bool)
    assert torch.equal(whiten(torch.full((7, 11), 0.1), mask), torch.zeros(7, 11))
    large = torch.full((3, 7), 1e6 + 0.1, dtype=torch.float64)
    assert torch.equal(whiten(large, mask[:3, :7]), torch.zeros(3, 7, dtype=torch.float64))
    assert torch.equal(whiten(torch.tensor([[3.0, 9.0]]), torch.tensor([[True, False]])), torch.zeros(1, 2))


def test_advantages_that_are_equal_but_for_rounding_whiten_to_0():
    """The two advantages are sums of three numbers in another order. Their difference would be divided by itself."""
    one, other = (sum(map(torch.tensor, order)) for order in ([0.3, 0.2, 0.2], [0.2, 0.2, 0.3]))
    assert one != other
    mask = torch.ones(2, 2, dtype=torch.bool)
    nearly = torch.stack([one, other])[:, None].expand(2, 2)
    assert torch.equal(whiten(nearly, mask), torch.zeros(2, 2))
    assert torch.equal(whiten(-1000 * nearly, mask), torch.zeros(2, 2))
    apart = torch.tensor([[1000.0, 1000.0], [1000.01, 1000.01]])
    assert whiten(apart, mask)[:, 0].tolist() == pytest.approx([-1.0, 1.0], rel=1e-5)
    exact = torch.tensor([[1.0, 1.0], [1.0 + 1e-14, 1.0 + 1e-14]], dtype=torch.float64)
    assert (whiten(exact, mask) != 0).all(), "of float64 they are no rounding"


def test_a_nan_at_a_response_token_is_not_hidden():
    mask = torch.ones(1, 3, dtype=torch.bool)
    broken = torch.tensor([[0.0, math.nan, 1.0]])
    whole = torch.zeros(1, 3)
    for rewards, values in ((broken, whole), (whole, broken)):
        assert gae(rewards, values, mask, gamma=1.0, lam=0.9).isnan().tolist() == [[True, True, False]]
    assert monte_carlo_returns(broken, mask, gamma=1.0).isnan().tolist() == [[True, True, False]]
    assert whiten(broken, mask).isnan().all()


def test_whiten_refuses_an_empty_mask():
    with pytest.raises(ValueError, match="no True element"):
        whiten(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))


def test_rows_without_tokens_and_tensors_without_columns_give_zeros():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    nan = torch.full((2, 3), math.nan)
    final_values = torch.full((2,), math.nan)
    assert torch.equal(
        gae(nan, nan, nothing, gamma=1.0, lam=0.9, final_values=final_values), torch.zeros(2, 3)
    )
    empty = torch.zeros(2, 0)
    assert gae(empty, empty, empty.bool(), gamma=1.0, lam=0.9).shape == (2, 0)
