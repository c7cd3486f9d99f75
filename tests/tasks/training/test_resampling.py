"""The bootstrap over prompts keeps the rows of one prompt together, counts what was not drawn, and repeats for a seed."""

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from vantage.algorithms.uncertainty import clustered_mean
from vantage.tasks.training.resampling import CONFIDENCES, Statistic, bootstrapped, bootstrapped_size


def mean_of(values: Tensor):
    return lambda weights: (weights @ values) / weights.sum(dim=1)


def correlated(rng: np.random.Generator, prompts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return rows of a prompt that share nearly everything."""
    values = rng.normal(size=(prompts, 1)) + 0.2 * rng.normal(size=(prompts, rows))
    return torch.tensor(values.ravel()), torch.arange(prompts).repeat_interleave(rows)


def test_of_a_mean_it_is_the_clustered_error() -> None:
    values, clusters = correlated(np.random.default_rng(0), 200, 4)
    found, expected = bootstrapped(mean_of(values), clusters, seed=1), clustered_mean(values, clusters)
    assert found.value == pytest.approx(expected.value)
    assert found.standard_error == pytest.approx(expected.standard_error, rel=0.06)
    assert (found.num_clusters, found.num_rows, found.intervals) == (200, 800, ())


def wrongs(of_rows: Tensor) -> Statistic:
    """Return a statistic of the weights (R,2N) of the rows and of the same rows turned: the weighted share that is wrong (R,1)."""
    both = torch.cat((of_rows, 1 - of_rows))
    return lambda weights: (weights @ both / weights.sum(dim=1))[:, None]


@pytest.mark.parametrize(("n", "exact"), [(4, 0.602), (16, 0.206), (64, 0.056)])
def test_prompts_that_are_all_right_may_hide_wrong_ones(n: int, exact: float) -> None:
    """With 0 wrong of n, the exact 97.5 % bound is 1 − 0.025^(1/n). A resample turns each prompt from right to wrong
    with probability 2/(n + 4)."""
    assert exact == pytest.approx(1 - 0.025 ** (1 / n), abs=5e-4)
    found = bootstrapped_size(wrongs(torch.zeros(n).double()), torch.arange(n), seed=0)
    assert [each[0] for each in found.intervals] == list(CONFIDENCES)
    _, low, high = next(each for each in found.intervals if each[0] == 0.95)
    turned = binom.ppf(0.975, n, 2 / (n + 4)) / n
    assert (found.value, low) == (0.0, 0.0)
    assert high == pytest.approx(turned)
    assert exact <= high < 1.5 * exact


def test_rows_of_a_prompt_are_turned_together() -> None:
    """8 prompts have 3 right rows each. In every resample, and so at every quantile, a multiple of 3/24 is wrong."""
    clusters = torch.arange(8).repeat_interleave(3)
    found = bootstrapped_size(wrongs(torch.zeros(24).double()), clusters, seed=0)
    assert all((8 * high) % 1 == pytest.approx(0) for _, _, high in found.intervals)
    assert bootstrapped_size(wrongs(torch.zeros(24).double()), clusters, seed=0) == found


def test_a_size_without_several_prompts_has_no_interval() -> None:
    alone = bootstrapped_size(wrongs(torch.zeros(3).double()), torch.zeros(3).long(), seed=0)
    assert (alone.value, alone.intervals) == (0.0, ())
    assert np.isnan(alone.standard_error)


def test_a_seed_repeats_it_and_clusters_may_have_any_numbers() -> None:
    values, clusters = correlated(np.random.default_rng(5), 20, 2)
    one = bootstrapped(mean_of(values), clusters, seed=3)
    assert bootstrapped(mean_of(values), clusters * 7 + 100, seed=3) == one
    assert bootstrapped(mean_of(values), clusters, seed=4) != one


def test_what_cannot_be_resampled_has_no_interval() -> None:
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    alone = bootstrapped(mean_of(values), torch.tensor([4, 4]), seed=0)
    assert (alone.value, alone.intervals) == (1.5, ())
    assert np.isnan(alone.standard_error)
    undefined = bootstrapped(
        lambda weights: torch.where(weights[:, 0] > 0, 1.0, torch.nan).double(), torch.tensor([0, 1]), seed=0
    )
    assert (undefined.value, undefined.intervals) == (1.0, ())
    assert np.isnan(undefined.standard_error)
    with pytest.raises(ValueError, match="no row to resample"):
        bootstrapped(mean_of(values), torch.zeros(0, dtype=torch.int64), seed=0)
