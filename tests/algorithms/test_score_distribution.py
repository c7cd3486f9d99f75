"""Quantiles and distances of score distributions equal scipy's and hand-worked values."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

from vantage.algorithms.score_distribution import distance_to, drift, quantiles


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


@pytest.mark.parametrize(("count", "others"), [(2, 5), (7, 3), (40, 64), (1, 2), (30, 30)])
def test_the_distance_of_any_numbers_of_scores_is_scipys(count: int, others: int) -> None:
    generator = torch.Generator().manual_seed(count)
    scores = torch.randint(-3, 6, (count,), generator=generator).float() / 2  # with ties
    of_data = torch.randn(others, generator=generator)
    expected = wasserstein_distance(scores.double().numpy(), of_data.double().numpy())
    assert distance_to(scores, of_data) == pytest.approx(expected / np.std(of_data.double().numpy()))
    if count == others:
        assert distance_to(scores, of_data) == pytest.approx(drift(scores, of_data))


def test_a_distance_by_hand() -> None:
    """Scores 0 and 2 have the deviation 1. A third of the mass of 0, 0, 3 lies one further, a sixth moves from 2 to 0."""
    assert distance_to(torch.tensor([0.0, 0.0, 3.0]), torch.tensor([0.0, 2.0])) == pytest.approx(2 / 3)
    assert distance_to(torch.tensor([5.0]), torch.tensor([0.0, 2.0])) == pytest.approx(4.0)
    assert math.isnan(distance_to(torch.tensor([1.0]), torch.ones(2)))
    with pytest.raises(ValueError, match="others is empty"):
        distance_to(torch.ones(2), torch.empty(0))


def test_quantiles_by_hand() -> None:
    """Quantiles of scores equal those worked out by hand."""
    assert quantiles(torch.tensor([3.0, 1.0, 2.0]), [0.0, 0.25, 0.5, 1.0]) == [1.0, 1.5, 2.0, 3.0]
