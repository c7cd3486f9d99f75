"""Advantages that look a limited number of tokens ahead are right: truncated GAE and n-step returns (PPO eq. 10-11)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.advantages import gae, n_step_advantages, truncated_gae

seeds = st.integers(0, 2**32 - 1)
unit = st.floats(0, 1)
horizons = st.integers(1, 12)
NAN = float("nan")


def random_batch(seed):
    """Return rewards, values, mask (gaps and empty rows too), λ and final value per row; NaN under the mask."""
    rng = np.random.default_rng(seed)
    num_rows, width = rng.integers(1, 6), rng.integers(1, 10)
    mask = torch.tensor(rng.random((num_rows, width)) < 0.7)
    rewards, values = (torch.tensor(rng.normal(size=(num_rows, width))) for _ in range(2))
    nan = torch.tensor(NAN, dtype=torch.float64)
    lam, final_values = torch.tensor(rng.random(num_rows)), torch.tensor(rng.normal(size=num_rows))
    return torch.where(mask, rewards, nan), torch.where(mask, values, nan), mask, lam, final_values


def by_definition(rewards, values, mask, gamma, lam, final_values, horizon):
    """Return A_t = Σ_{k < horizon} (γλ)^k δ_{t+k}, as an O(T²) sum over a row whose masked positions are deleted."""
    advantages = np.zeros(mask.shape)
    for row in range(mask.shape[0]):
        kept = [t for t in range(mask.shape[1]) if mask[row, t]]
        v = [float(values[row, t]) for t in kept] + [float(final_values[row])]
        delta = [float(rewards[row, t]) + gamma * v[i + 1] - v[i] for i, t in enumerate(kept)]
        for i, t in enumerate(kept):
            decay = gamma * float(lam[row])
            window = range(i, min(i + horizon, len(kept)))
            advantages[row, t] = sum(decay ** (k - i) * delta[k] for k in window)
    return advantages


@settings(max_examples=80)
@given(seed=seeds, gamma=unit, horizon=horizons)
def test_truncated_gae_is_its_definition_for_any_mask_lambda_per_row_and_final_value(seed, gamma, horizon):
    rewards, values, mask, lam, final_values = random_batch(seed)
    measured = truncated_gae(
        rewards, values, mask, gamma=gamma, lam=lam, horizon=horizon, final_values=final_values
    )
    expected = by_definition(rewards, values, mask, gamma, lam, final_values, horizon)
    np.testing.assert_allclose(measured.numpy(), expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=60)
@given(seed=seeds, gamma=unit, num_steps=horizons)
def test_n_step_advantages_are_rewards_and_one_value_less_another(seed, gamma, num_steps):
    """The advantages equal Σ_{k<n} γ^k r_{t+k} + γ^n V_{t+n} − V_t, computed without any δ. Beyond the end of a row V
    is the row's final value."""
    rewards, values, mask, _, final_values = random_batch(seed)
    measured = n_step_advantages(
        rewards, values, mask, gamma=gamma, num_steps=num_steps, final_values=final_values
    )
    for row in range(mask.shape[0]):
        kept = mask[row].nonzero().flatten().tolist()
        r = [float(rewards[row, t]) for t in kept]
        v = [*(float(values[row, t]) for t in kept), float(final_values[row])]
        for i, t in enumerate(kept):
            n = min(num_steps, len(kept) - i)
            expected = sum(gamma**k * r[i + k] for k in range(n)) + gamma**n * v[i + n] - v[i]
            assert float(measured[row, t]) == pytest.approx(expected, rel=1e-9, abs=1e-11)
    assert not measured[~mask].any()


def test_by_hand():
    """Truncated GAE and n-step advantages equal those worked out in the comments."""
    # γ = ½; r = 1, 0, 4 and V = 1, 3, 2, then a pad; after the last token 0, or 8 of a response that was cut off.
    #   δ_0 = 1 + ½·3 − 1 = 1.5      δ_1 = 0 + ½·2 − 3 = −2      δ_2 = 4 − 2 = 2, or 4 + ½·8 − 2 = 6
    rewards, values = torch.tensor([[1.0, 0.0, 4.0, 0.0]]), torch.tensor([[1.0, 3.0, 2.0, 99.0]])
    mask, end = torch.tensor([[True, True, True, False]]), torch.tensor([8.0])
    # two steps with λ = ½, so γλ = ¼: A_0 = 1.5 + ¼·(−2), A_1 = −2 + ¼·δ_2, A_2 = δ_2
    two = truncated_gae(rewards, values, mask, gamma=0.5, lam=0.5, horizon=2)
    assert two.tolist() == [[1.0, -1.5, 2.0, 0.0]]
    cut = truncated_gae(rewards, values, mask, gamma=0.5, lam=0.5, horizon=2, final_values=end)
    assert cut.tolist() == [[1.0, -0.5, 6.0, 0.0]]
    # two-step returns: A_0 = 1 + ½·0 + ¼·V_2 − 1 = 0.5, A_1 = 0 + ½·4 (+ ¼·8) − 3 = −1 (or 1), A_2 = δ_2
    assert n_step_advantages(rewards, values, mask, gamma=0.5, num_steps=2).tolist() == [
        [0.5, -1.0, 2.0, 0.0]
    ]
    cut = n_step_advantages(rewards, values, mask, gamma=0.5, num_steps=2, final_values=end)
    assert cut.tolist() == [[0.5, 1.0, 6.0, 0.0]]


def test_steps_are_counted_without_gaps():
    rewards = torch.tensor([[1.0, NAN, 0.0, NAN, 4.0]])
    values = torch.tensor([[1.0, NAN, 3.0, -7.0, 2.0]])
    mask = torch.tensor([[True, False, True, False, True]])
    two = truncated_gae(rewards, values, mask, gamma=0.5, lam=0.5, horizon=2)
    assert two.tolist() == [[1.0, 0.0, -1.5, 0.0, 2.0]]


@settings(max_examples=30)
@given(seed=seeds, gamma=unit)
def test_a_horizon_of_1_is_lambda_0_and_one_of_the_whole_response_is_gae(seed, gamma):
    rewards, values, mask, lam, final_values = random_batch(seed)

    def truncated(horizon, lam):
        return truncated_gae(
            rewards, values, mask, gamma=gamma, lam=lam, horizon=horizon, final_values=final_values
        )

    def whole(lam):
        return gae(rewards, values, mask, gamma=gamma, lam=lam, final_values=final_values)

    torch.testing.assert_close(truncated(1, lam), whole(0.0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(truncated(3, 0.0), whole(0.0), rtol=1e-10, atol=1e-12)
    for horizon in (mask.shape[1], 10_000):
        torch.testing.assert_close(truncated(horizon, lam), whole(lam), rtol=0, atol=0)
        torch.testing.assert_close(truncated(horizon, 1.0), whole(1.0), rtol=0, atol=0)


@settings(max_examples=20)
@given(seed=seeds, horizon=horizons)
def test_padding_row_order_and_lambda_per_row_change_nothing(seed, horizon):
    rewards, values, mask, lam, final_values = random_batch(seed)
    whole = truncated_gae(
        rewards, values, mask, gamma=0.9, lam=lam, horizon=horizon, final_values=final_values
    )
    padding = torch.zeros(len(mask), 3)
    wide = truncated_gae(
        torch.cat([rewards, padding], dim=1),
        torch.cat([values, padding + NAN], dim=1),
        torch.cat([mask, padding.bool()], dim=1),
        gamma=0.9,
        lam=lam,
        horizon=horizon,
        final_values=final_values,
    )
    assert torch.equal(wide[:, : mask.shape[1]], whole)
    for row in reversed(range(len(mask))):
        rows = slice(row, row + 1)
        alone = truncated_gae(
            rewards[rows], values[rows], mask[rows], gamma=0.9, lam=float(lam[row]), horizon=horizon,
            final_values=final_values[rows],
        )  # fmt: skip
        torch.testing.assert_close(alone, whole[rows], rtol=1e-12, atol=1e-12)


def test_long_responses_stay_accurate_in_float32():
    """With 4,096 tokens and γ = λ = 1, what is subtracted is as large as what is left."""
    rng = np.random.default_rng(0)
    rewards, values = (rng.normal(size=(1, 4096)) for _ in range(2))
    mask = torch.ones(1, 4096).bool()
    measured = truncated_gae(
        torch.tensor(rewards).float(), torch.tensor(values).float(), mask, gamma=1.0, lam=1.0, horizon=16
    )
    assert measured.dtype == torch.float32
    single = rewards.astype(np.float32).astype(np.float64), values.astype(np.float32).astype(np.float64)
    expected = by_definition(*single, mask.numpy(), 1.0, [1.0], [0.0], 16)
    np.testing.assert_allclose(measured.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_it_passes_no_gradient():
    """No gradient flows through truncated advantages."""
    rewards, values = torch.ones(1, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    assert not truncated_gae(
        rewards, values, torch.ones(1, 3).bool(), gamma=1.0, lam=0.9, horizon=2
    ).requires_grad


def test_refusals():
    """Wrong arguments of truncated advantages are refused by message."""
    ones, mask = torch.ones(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match="horizon=0 is below 1"):
        truncated_gae(ones, ones, mask, gamma=1.0, lam=1.0, horizon=0)
    with pytest.raises(ValueError, match="horizon=-1 is below 1"):
        n_step_advantages(ones, ones, mask, gamma=1.0, num_steps=-1)
    with pytest.raises(ValueError, match="lam=1.5 is outside"):
        truncated_gae(ones, ones, mask, gamma=1.0, lam=1.5, horizon=2)
    with pytest.raises(ValueError, match="outside response_mask"):
        truncated_gae(ones, ones, ~mask, gamma=1.0, lam=1.0, horizon=2)
    empty = torch.zeros(2, 0)
    assert truncated_gae(empty, empty, empty.bool(), gamma=1.0, lam=1.0, horizon=2).shape == (2, 0)
