"""Quantiles and distances of score distributions, against scipy and by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu, wasserstein_distance

from vantage.algorithms.score_distribution import drift, pair_accuracy, quantiles


@pytest.mark.parametrize("count", [2, 7, 40])
def test_drift_is_scipys_distance_in_standard_deviations(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    scores = torch.randn(count, generator=generator) * 2 + 1
    before = torch.randn(count, generator=generator)
    expected = wasserstein_distance(scores.double().numpy(), before.double().numpy())
    assert drift(scores, before) == pytest.approx(expected / np.std(before.double().numpy()))
    assert drift(before, before) == 0.0


def test_scores_that_all_move_by_one_have_moved_by_one() -> None:
    before = torch.tensor([0.0, 2.0])  # standard deviation 1
    assert drift(before + 1, before) == pytest.approx(1.0)
    assert math.isnan(drift(before, torch.ones(2)))
    with pytest.raises(ValueError, match="before is empty"):
        drift(before, torch.empty(0))
    with pytest.raises(ValueError, match="there are 2 scores now and 3 before"):
        drift(before, torch.ones(3))


def test_quantiles_by_hand() -> None:
    assert quantiles(torch.tensor([3.0, 1.0, 2.0]), [0.0, 0.25, 0.5, 1.0]) == [1.0, 1.5, 2.0, 3.0]


def test_pair_accuracy_is_mann_whitneys_u_over_the_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (30,), generator=generator).double()  # with ties
    right = torch.rand(30, generator=generator) < 0.4
    u = mannwhitneyu(scores[right].numpy(), scores[~right].numpy()).statistic
    pairs = int(right.sum()) * int((~right).sum())
    assert pair_accuracy(scores, right) == pytest.approx(u / pairs)
    assert math.isnan(pair_accuracy(scores, torch.ones(30, dtype=torch.bool)))
    with pytest.raises(ValueError, match="both are"):
        pair_accuracy(scores, right[:3])
