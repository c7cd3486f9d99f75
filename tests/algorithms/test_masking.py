import math

import pytest
import torch

from vantage.algorithms.masking import check_response_mask, keep


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e38])
def test_keep_passes_neither_value_nor_gradient_of_what_it_drops(garbage):
    leaf = torch.tensor([2.0, garbage], requires_grad=True)
    kept = keep(leaf, torch.tensor([True, False]))
    assert kept.tolist() == [2.0, 0.0]
    kept.square().sum().backward()
    assert leaf.grad.tolist() == [4.0, 0.0]


def test_keep_widens_half_precision_only():
    mask = torch.tensor([True])
    assert keep(torch.ones(1, dtype=torch.bfloat16), mask).dtype == torch.float32
    assert keep(torch.ones(1, dtype=torch.float64), mask).dtype == torch.float64


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(TypeError, match=r"response_mask has dtype torch.float32; it must be torch.bool"):
        check_response_mask(torch.ones(2, 3))


def test_shapes_are_refused_by_name_rather_than_broadcast():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"response_mask has shape \(3,\); it must be \(B, T\)"):
        check_response_mask(mask[0])
    with pytest.raises(ValueError, match=r"values has shape \(2, 1\); it must be \(2, 3\)"):
        check_response_mask(mask, values=torch.ones(2, 1))
