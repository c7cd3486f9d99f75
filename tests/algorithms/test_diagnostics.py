import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.diagnostics import explained_variance, sampler_gap, value_diagnostics


def random_batch(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((rng.integers(2, 7), rng.integers(2, 9))) < 0.7
    mask[0, :2] = True
    values, returns = (np.where(mask, rng.normal(size=mask.shape), math.nan) for _ in range(2))
    return torch.tensor(values), torch.tensor(returns), torch.tensor(mask)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_explained_variance_is_the_definition(seed):
    values, returns, mask = random_batch(seed)
    v, g = values.numpy()[mask.numpy()], returns.numpy()[mask.numpy()]
    expected = 1 - np.var(g - v) / np.var(g)
    assert explained_variance(values, returns, mask) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_perfect_shifted_constant_and_worse_critics(seed):
    values, returns, mask = random_batch(seed)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1, abs=1e-9)
    assert explained_variance(torch.full_like(values, 3.7), returns, mask) == pytest.approx(0, abs=1e-9)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3, abs=1e-9)  # 1 − Var(2G)/Var(G)


def test_by_hand():
    """Explained variance and its parts equal those worked out in the comments."""
    # G = 0, 2, 4, 6: Var 5. G − V = −1, 1, −1, 1: Var 1. EV = 1 − 1/5.
    returns = torch.tensor([[0.0, 2.0], [4.0, 6.0]])
    values = torch.tensor([[1.0, 1.0], [5.0, 5.0]])
    mask = torch.ones(2, 2).bool()
    assert explained_variance(values, returns, mask) == pytest.approx(0.8)
    diagnostics = value_diagnostics(values, returns, mask, num_positions=2, constant=4.0)
    assert diagnostics.explained_variance == pytest.approx(0.8)
    assert diagnostics.return_variance == pytest.approx(5)
    assert diagnostics.bias == pytest.approx(0)
    assert diagnostics.mse == pytest.approx(1)
    assert diagnostics.constant_mse == pytest.approx((16 + 4 + 0 + 4) / 4)
    assert diagnostics.num_tokens == 4
    # First halves: G 0, 4, V 1, 5; second halves: G 2, 6, V 1, 5; in each G − V is constant, so EV is 1.
    assert diagnostics.explained_variance_by_position == (1.0, 1.0)


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.1, -3.3])
def test_equal_returns_leave_it_undefined_whatever_their_rounding(value):
    mask = torch.ones(3, 7).bool()
    measured = explained_variance(torch.randn(3, 7), torch.full((3, 7), value, dtype=torch.float64), mask)
    assert math.isnan(measured)
    assert not measured >= -1e9  # the gate's comparison: closed at any threshold


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_valid_entry_that_is_not_finite_closes_the_gate(bad):
    returns, mask = torch.tensor([[0.0, 1.0, 2.0]]), torch.ones(1, 3).bool()
    broken = torch.tensor([[0.0, bad, 2.0]])
    assert math.isnan(explained_variance(broken, returns, mask))
    assert math.isnan(explained_variance(returns, broken, mask))


def test_it_is_not_the_average_over_micro_batches():
    """Explained variance is that of the whole batch, not the average over micro-batches."""
    # Alone, each response has equal returns: undefined. A critic that tells the two apart is perfect.
    returns = torch.tensor([[1.0, 1.0], [5.0, 5.0]])
    mask = torch.ones(2, 2).bool()
    assert math.isnan(explained_variance(returns[:1], returns[:1], mask[:1]))
    assert explained_variance(returns, returns, mask) == 1


def test_float32_with_a_large_offset_keeps_its_digits():
    rng = np.random.default_rng(1)
    returns = (1000 + 1e-2 * rng.normal(size=(20, 50))).astype(np.float32)
    values = (1000 + (returns - 1000) * 0.5).astype(np.float32)
    v, g = values.astype(np.float64), returns.astype(np.float64)
    measured = explained_variance(torch.tensor(values), torch.tensor(returns), torch.ones(20, 50).bool())
    assert measured == pytest.approx(1 - np.var(g - v) / np.var(g), rel=1e-9)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), num_positions=st.integers(1, 5))
def test_value_diagnostics_are_their_definitions(seed, num_positions):
    values, returns, mask = random_batch(seed)
    v, g = values.numpy()[mask.numpy()], returns.numpy()[mask.numpy()]
    measured = value_diagnostics(values, returns, mask, num_positions=num_positions)
    assert measured.explained_variance == explained_variance(values, returns, mask)
    assert measured.return_variance == pytest.approx(np.var(g))
    assert measured.constant_mse == pytest.approx(np.var(g))
    assert measured.bias == pytest.approx(np.mean(v - g), abs=1e-12)
    assert measured.mse == pytest.approx(np.mean((v - g) ** 2))

    parts = [[] for _ in range(num_positions)]
    for row in range(mask.shape[0]):
        kept = mask[row].nonzero().flatten().tolist()
        for k, t in enumerate(kept):
            parts[k * num_positions // len(kept)].append((values[row, t].item(), returns[row, t].item()))
    for part, by_position in zip(parts, measured.explained_variance_by_position, strict=True):
        if len(part) < 2:
            assert math.isnan(by_position)
            continue
        part_v, part_g = np.array(part).T
        assert by_position == pytest.approx(1 - np.var(part_g - part_v) / np.var(part_g), rel=1e-6, abs=1e-6)


def test_padding_and_row_order_change_nothing():
    values, returns, mask = random_batch(5)
    expected = value_diagnostics(values, returns, mask)
    pad = torch.nn.functional.pad
    padded = [pad(values, (0, 4), value=math.nan), pad(returns, (0, 4), value=9.0), pad(mask, (0, 4))]
    assert repr(value_diagnostics(*padded)) == repr(expected)  # compared by repr, in which NaN equals NaN
    order = torch.arange(len(mask)).flip(0)
    permuted = explained_variance(values[order], returns[order], mask[order])
    assert permuted == pytest.approx(expected.explained_variance, rel=1e-12)


def test_refusals():
    """Wrong shapes, masks and values are refused by message."""
    ones = torch.ones(2, 2)
    with pytest.raises(ValueError, match="response_mask has no True element; a diagnosis needs"):
        explained_variance(ones, ones, ~ones.bool())
    with pytest.raises(ValueError, match="num_positions=0 is below 1"):
        value_diagnostics(ones, ones, ones.bool(), num_positions=0)
    with pytest.raises(ValueError, match=r"returns has shape \(2, 3\); it must be \(2, 2\)"):
        explained_variance(ones, torch.ones(2, 3), ones.bool())


def test_the_gap_between_trainer_and_sampler_by_hand():
    """For Δ = log 2, −log 4 and 0 the mean of |Δ| is log 2, and e^(−Δ) = ½, 4 and 1, so k3 = (5.5 − 3 − log 2)/3."""
    mask = torch.tensor([[True, True], [True, False]])
    sampler = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]], dtype=torch.float64)
    deltas = torch.tensor([[math.log(2), -math.log(4)], [0.0, math.nan]], dtype=torch.float64)
    gap = sampler_gap(sampler + deltas, sampler, mask)
    assert gap.mean == pytest.approx(math.log(2))
    assert gap.k3 == pytest.approx((5.5 - 3 - math.log(2)) / 3)
    assert gap.worst == pytest.approx(math.log(4))
    assert sampler_gap(sampler, sampler, mask) == type(gap)(0.0, 0.0, 0.0)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-6, 1e-2, 1.0]))
def test_the_gap_is_the_definition_whatever_stands_outside_the_mask(seed, scale):
    sampler, noise, mask = random_batch(seed)
    trainer = sampler + scale * noise
    delta = [float(t) - float(s) for t, s in zip(trainer[mask], sampler[mask], strict=True)]
    gap = sampler_gap(trainer, sampler, mask)
    assert gap.mean == pytest.approx(sum(map(abs, delta)) / len(delta), rel=1e-9)
    k3 = sum(math.exp(-d) - 1 + d for d in delta) / len(delta)
    assert gap.k3 == pytest.approx(k3, rel=1e-9, abs=1e-15)
    assert gap.k3 >= 0
    assert gap.worst == pytest.approx(max(map(abs, delta)), rel=1e-9)


def test_the_mean_ratio_hides_another_temperature_and_the_gap_does_not():
    """Tokens are sampled at T = 0.7 and read at T = 1: the ratio has the expectation 1, yet the mean |Δ| is not 0."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 50, generator=generator, dtype=torch.float64) * 2
    sampler, trainer = ((logits / temperature).log_softmax(dim=-1) for temperature in (0.7, 1.0))
    tokens = torch.multinomial(sampler.exp(), 1, generator=generator)
    said, sampled = trainer.gather(1, tokens), sampler.gather(1, tokens)
    ratio = (said - sampled).exp()
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (ratio - 1).abs().mean().item() > 0.3
    gap = sampler_gap(said, sampled, torch.ones_like(said, dtype=torch.bool))
    assert gap.mean > 0.3
    assert gap.k3 > 0.05


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_probability_that_is_no_number_leaves_no_small_gap(value):
    trainer = torch.tensor([[value, -1.0]])
    gap = sampler_gap(trainer, torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2).bool())
    assert not gap.mean <= 1e9
    assert not gap.worst <= 1e9


def test_a_gap_of_no_tokens_is_refused():
    nothing = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="response_mask has no True element"):
        sampler_gap(nothing, nothing, nothing.bool())
