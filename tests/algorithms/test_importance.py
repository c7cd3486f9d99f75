"""Truncated importance weights, by hand."""

import math

import pytest
import torch

from vantage.algorithms.importance import truncated_importance_weights


def test_by_hand() -> None:
    """Ratios 1.5, 3 and 0.5, and a token outside the mask: at most 2."""
    old = torch.tensor([[0.1, 0.2, 0.3, 0.9]])
    now = torch.tensor([[0.15, 0.6, 0.15, math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    found = truncated_importance_weights(now.log(), old.log(), mask, cap=2.0)
    torch.testing.assert_close(found.weights, torch.tensor([[1.5, 2.0, 0.5, 0.0]]))
    assert found.importance_weight.mean() == pytest.approx(4.0 / 3)
    assert found.importance_capped.mean() == pytest.approx(1 / 3)


def test_no_gradient_flows_and_no_ratio_overflows() -> None:
    now = torch.tensor([[0.0, -1.0]], requires_grad=True)
    found = truncated_importance_weights(
        now, torch.tensor([[-500.0, -1.0]]), torch.ones(1, 2).bool(), cap=5.0
    )
    assert found.weights.tolist() == [[5.0, 1.0]] and not found.weights.requires_grad


def test_a_cap_is_above_0_and_shapes_are_equal() -> None:
    tokens, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match="cap=0.0 is not above 0"):
        truncated_importance_weights(tokens, tokens, mask, cap=0.0)
    with pytest.raises(ValueError, match=r"sampler_logprobs has shape \(1, 3\)"):
        truncated_importance_weights(tokens, torch.zeros(1, 3), mask, cap=2.0)
