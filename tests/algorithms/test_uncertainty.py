"""Standard errors over clusters equal hand-worked values, NumPy's, and the true spread of a simulation."""

import math

import numpy as np
import pytest
import torch

from vantage.algorithms.diagnostics import explained_variance
from vantage.algorithms.uncertainty import (
    clustered_explained_variance,
    clustered_mean,
    clustered_ratio,
    with_cluster_sizes,
)


def test_a_mean_by_hand() -> None:
    """Prompts 7, 3 and 9 have means 1, 0 and 0.5 with standard deviation 0.5 (ddof 1). The error is 0.5/√3 = 0.2887."""
    estimate = clustered_mean(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([7, 3, 9, 7, 9, 3]))
    assert (estimate.value, estimate.num_clusters, estimate.num_rows) == (0.5, 3, 6)
    assert estimate.standard_error == pytest.approx(0.5 / math.sqrt(3))


def test_a_ratio_by_hand() -> None:
    """Clusters with (numerator, denominator) (6, 2), (2, 2) and (4, 4) have r = 12/8 = 1.5 and residuals 3, −1 and −2.

    The variance is 3/2 · (9 + 1 + 4) / 64 = 0.328125, and its root is 0.5728.
    """
    numerators, denominators = torch.tensor([6.0, 1.0, 4.0, 1.0]), torch.tensor([2, 1, 4, 1])
    estimate = clustered_ratio(numerators, denominators, torch.tensor([0, 1, 2, 1]))
    assert estimate.value == 1.5
    assert estimate.standard_error == pytest.approx(math.sqrt(0.328125))
    assert (estimate.num_clusters, estimate.num_rows) == (3, 4)


def test_a_single_prompt_has_no_error() -> None:
    estimate = clustered_mean(torch.tensor([1.0, 0.0]), torch.tensor([4, 4]))
    assert (estimate.value, estimate.num_clusters) == (0.5, 1)
    assert math.isnan(estimate.standard_error)


def test_unequal_prompts_count_as_fewer_equal_ones() -> None:
    """Prompts with 3, 1 and 2 responses count as (3 + 1 + 2)² / (9 + 1 + 4) = 36/14 equal ones, fewer than 3."""
    values, clusters = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([7, 7, 9, 7, 3, 3])
    estimate = with_cluster_sizes(clustered_mean(values, clusters), clusters)
    assert estimate.equal_clusters == pytest.approx(36 / 14)
    equal = torch.tensor([7, 7, 9, 9, 3, 3])
    assert with_cluster_sizes(clustered_mean(values, equal), equal).equal_clusters is None


def test_the_order_of_rows_and_the_numbers_of_prompts_change_nothing() -> None:
    rng = np.random.default_rng(1)
    values, clusters = torch.tensor(rng.normal(size=30)), torch.tensor(rng.integers(0, 8, size=30))
    order = torch.tensor(rng.permutation(30))
    one, other = clustered_mean(values, clusters), clustered_mean(values[order], 1000 - clusters[order])
    assert other.value == pytest.approx(one.value)
    assert other.standard_error == pytest.approx(one.standard_error)


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_the_error_that_is_told_is_the_true_spread(correlation: float) -> None:
    """In 4,000 experiments of 100 prompts with 4 correlated responses each, the reported error is the means' spread.

    An estimate for independent rows would report σ/√400 = 0.05 whatever the correlation; the true spread is
    0.05·√(1 + 3·correlation).
    """
    rng = np.random.default_rng(2)
    clusters = torch.arange(100).repeat_interleave(4)
    means, told = [], []
    for _ in range(4000):
        shared, own = rng.normal(size=(100, 1)), rng.normal(size=(100, 4))
        rows = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
        estimate = clustered_mean(torch.tensor(rows.ravel()), clusters)
        means.append(estimate.value)
        told.append(estimate.standard_error**2)
    truth = 0.05 * math.sqrt(1 + 3 * correlation)
    assert math.sqrt(np.mean(told)) == pytest.approx(truth, rel=0.02)
    assert np.std(means) == pytest.approx(truth, rel=0.04)


@pytest.mark.slow
def test_a_ratio_of_uneven_clusters_is_told_its_true_spread() -> None:
    """Responses have 5 to 50 tokens; each prompt has a level of its own, and 1 to 4 responses."""
    rng = np.random.default_rng(3)
    ratios, told = [], []
    for _ in range(3000):
        sizes = rng.integers(1, 5, size=120)
        clusters = np.repeat(np.arange(120), sizes)
        lengths = rng.integers(5, 51, size=len(clusters))
        levels = np.repeat(rng.normal(1.0, 0.3, size=120), sizes)
        nll = levels * lengths + rng.normal(size=len(clusters)) * np.sqrt(lengths)
        estimate = clustered_ratio(torch.tensor(nll), torch.tensor(lengths), torch.tensor(clusters))
        ratios.append(estimate.value)
        told.append(estimate.standard_error**2)
    assert math.sqrt(np.mean(told)) == pytest.approx(np.std(ratios), rel=0.05)


def batch_of_tokens(
    rng: np.random.Generator, prompts: int, copies: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, returns, mask (B,T) and clusters (B,) of responses whose returns are correlated within a prompt."""
    rows, width = prompts * copies, 6
    mask = np.arange(width) < rng.integers(1, width + 1, size=(rows, 1))
    level = np.repeat(rng.normal(size=(prompts, 1)), copies, axis=0)
    returns = np.where(mask, level + 0.5 * rng.normal(size=(rows, width)), np.nan)
    values = np.where(mask, 0.7 * level + 0.3 * rng.normal(size=(rows, width)), np.nan)
    clusters = torch.arange(prompts).repeat_interleave(copies)
    return torch.tensor(values), torch.tensor(returns), torch.tensor(mask), clusters


def test_the_jackknife_is_what_leaving_out_each_prompt_in_turn_gives() -> None:
    values, returns, mask, clusters = batch_of_tokens(np.random.default_rng(4), prompts=7, copies=3)
    left = [
        explained_variance(values[clusters != out], returns[clusters != out], mask[clusters != out])
        for out in range(7)
    ]
    estimate = clustered_explained_variance(values, returns, mask, clusters)
    assert estimate.value == pytest.approx(explained_variance(values, returns, mask), abs=1e-12)
    assert estimate.standard_error == pytest.approx(math.sqrt(6 * np.var(left)))
    assert (estimate.num_clusters, estimate.num_rows) == (7, 21)


@pytest.mark.slow
def test_the_jackknife_of_explained_variance_is_told_its_true_spread() -> None:
    rng = np.random.default_rng(5)
    estimates = [
        clustered_explained_variance(*batch_of_tokens(rng, prompts=60, copies=4)) for _ in range(1500)
    ]
    told = math.sqrt(np.mean([estimate.standard_error**2 for estimate in estimates]))
    assert told == pytest.approx(np.std([estimate.value for estimate in estimates]), rel=0.1)


def test_explained_variance_of_large_returns_keeps_its_digits() -> None:
    values, returns, mask, clusters = batch_of_tokens(np.random.default_rng(6), prompts=9, copies=2)
    near = clustered_explained_variance(values, returns, mask, clusters)
    far = clustered_explained_variance(values + 1e8, returns + 1e8, mask, clusters)
    assert far.value == pytest.approx(near.value, abs=1e-5)
    assert far.standard_error == pytest.approx(near.standard_error, rel=1e-3)


def test_explained_variance_is_undefined_where_returns_do_not_vary() -> None:
    mask = torch.ones(4, 2, dtype=torch.bool)
    estimate = clustered_explained_variance(torch.rand(4, 2), torch.ones(4, 2), mask, torch.arange(4))
    assert math.isnan(estimate.value)
    assert math.isnan(estimate.standard_error)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="one row or more"):
        clustered_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="needs a positive sum"):
        clustered_ratio(torch.ones(2), torch.zeros(2), torch.arange(2))
    with pytest.raises(ValueError, match="denominators"):
        clustered_ratio(torch.ones(2), torch.ones(3), torch.arange(2))
    with pytest.raises(ValueError, match="no True element"):
        empty = torch.zeros(2, 3, dtype=torch.bool)
        clustered_explained_variance(torch.rand(2, 3), torch.rand(2, 3), empty, torch.arange(2))
