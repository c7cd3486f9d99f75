import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.value_loss import value_loss


def test_by_hand():
    """The value loss equals the one worked out in the comment."""
    # Errors 1 and −3 on two valid tokens: ½·(1 + 9)/2 = 2.5.
    values = torch.tensor([[2.0, 1.0, math.nan]], requires_grad=True)
    targets, mask = torch.tensor([[1.0, 4.0, math.nan]]), torch.tensor([[True, True, False]])
    result = value_loss(values, None, targets, mask)
    assert result.loss.item() == 2.5
    assert (result.value_mse.sum.item(), result.value_bias.sum.item(), result.value_mse.count.item()) == (
        10,
        -2,
        2,
    )
    assert torch.autograd.grad(result.loss, values)[0].tolist() == [[1 / 2, -3 / 2, 0.0]]


def test_clipped_by_hand():
    """The clipped value loss equals the one worked out in the comment."""
    # c = 0.5, around old values of 0; V → clip(V); squared errors unclipped and clipped:
    #   V = 2,   target 3: 1 and (0.5 − 3)² = 6.25: the clip binds, gradient 0
    #   V = 2,   target 0: 4 and 0.25: unclipped, gradient 2
    #   V = 0.3, target 1: 0.49 either way, gradient −0.7
    # Loss ½·(6.25 + 4 + 0.49)/3.
    values = torch.tensor([[2.0, 2.0, 0.3]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[3.0, 0.0, 1.0]], dtype=torch.float64)
    result = value_loss(
        values, torch.zeros_like(targets), targets, torch.ones(1, 3).bool(), value_clip_range=0.5
    )
    assert result.loss.item() == pytest.approx(0.5 * (6.25 + 4 + 0.49) / 3)
    gradient = torch.autograd.grad(result.loss, values)[0].numpy()
    np.testing.assert_allclose(gradient, [[0, 2 / 3, -0.7 / 3]], rtol=1e-12)
    assert (result.value_clip_fraction.sum.item(), result.value_clip_fraction.count.item()) == (1, 3)
    assert result.value_mse.sum.item() == pytest.approx(1 + 4 + 0.49)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), clip_range=st.one_of(st.none(), st.floats(0.05, 2)))
def test_value_and_gradient_are_the_definition(seed, clip_range):
    rng = np.random.default_rng(seed)
    mask = rng.random((rng.integers(1, 6), rng.integers(1, 8))) < 0.7
    mask[0, 0] = True
    values, old, targets = (np.where(mask, rng.normal(size=mask.shape), math.nan) for _ in range(3))
    loss, gradient, num_tokens = 0.0, np.zeros(mask.shape), mask.sum()
    for row, t in zip(*np.nonzero(mask), strict=True):
        error = values[row, t] - targets[row, t]
        per_token, slope = error**2, error
        if clip_range is not None:
            clipped = min(max(values[row, t], old[row, t] - clip_range), old[row, t] + clip_range)
            if (clipped - targets[row, t]) ** 2 > per_token:
                per_token, slope = (clipped - targets[row, t]) ** 2, 0.0
        loss += 0.5 * per_token / num_tokens
        gradient[row, t] = slope / num_tokens

    leaf = torch.tensor(values, requires_grad=True)
    result = value_loss(
        leaf, torch.tensor(old), torch.tensor(targets), torch.tensor(mask), value_clip_range=clip_range
    )
    assert result.loss.item() == pytest.approx(loss, rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(
        torch.autograd.grad(result.loss, leaf)[0].numpy(), gradient, rtol=1e-10, atol=1e-14
    )


def test_gradient_by_finite_differences():
    generator = torch.Generator().manual_seed(4)
    values, old, targets = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(4) < torch.tensor([4, 2, 1])[:, None]

    def loss(leaf):
        return value_loss(leaf, old, targets, mask, value_clip_range=0.3).loss

    assert torch.autograd.gradcheck(loss, values.requires_grad_())


def test_only_the_values_get_a_gradient():
    values, old, targets = (torch.full((1, 2), float(n), requires_grad=True) for n in range(3))
    value_loss(values, old, targets, torch.ones(1, 2).bool(), value_clip_range=0.2).loss.backward()
    assert values.grad is not None and old.grad is None and targets.grad is None


def test_refusals():
    """Wrong arguments of the value loss are refused by message."""
    ones, mask = torch.ones(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match="value_clip_range=0 is not positive; use None for no clip"):
        value_loss(ones, ones, ones, mask, value_clip_range=0)
    with pytest.raises(ValueError, match=r"value_clip_range=0.2 clips around old_values, which is None"):
        value_loss(ones, None, ones, mask, value_clip_range=0.2)
    with pytest.raises(ValueError, match=r"old_values has shape \(1, 3\); it must be \(1, 2\)"):
        value_loss(ones, torch.ones(1, 3), ones, mask, value_clip_range=0.2)
    with pytest.raises(ValueError, match="response_mask has no True element"):
        value_loss(ones, ones, ones, ~mask)
