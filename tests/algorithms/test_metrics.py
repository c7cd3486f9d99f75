import math
from dataclasses import dataclass

import torch

from vantage.algorithms.metrics import SumCount, metrics_of, sum_count


def test_sum_count_by_hand_with_garbage_under_the_mask():
    measured = sum_count(torch.tensor([1.0, 2.0, math.nan, 6.0]), torch.tensor([True, True, False, True]))
    assert (measured.sum.item(), measured.count.item(), measured.mean()) == (9.0, 3, 3.0)


def test_parts_add_up_where_their_means_would_not():
    # 1 of 1 and 0 of 3: together 1/4, while the mean of the means is 1/2.
    short = sum_count(torch.tensor([True]), torch.tensor([True]))
    long = sum_count(torch.tensor([False, False, False]), torch.ones(3, dtype=torch.bool))
    assert (short + long).mean() == 0.25


def test_nothing_counted_is_undefined():
    assert math.isnan(SumCount(torch.tensor(0.0), torch.tensor(0)).mean())


def test_metrics_are_detached_and_named_like_their_fields():
    @dataclass(frozen=True)
    class SomeLoss:
        loss: torch.Tensor
        accuracy: SumCount

    leaf = torch.ones(2, requires_grad=True)
    accuracy = sum_count(leaf * 2, torch.ones(2, dtype=torch.bool))
    assert not accuracy.sum.requires_grad
    assert metrics_of(SomeLoss(loss=leaf.sum(), accuracy=accuracy)) == {"accuracy": accuracy}
