"""The agreement of a reward and a judge on pairs equals scipy's statistics, a loop over pairs, and resampled prompts."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu, somersd

from vantage.algorithms import pair_agreement as module
from vantage.algorithms.pair_agreement import pair_agreement

ROWS = torch.arange(30)


def scores_of(seed: int, count: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores with ties, and a judge's whole numbers that are correlated with them."""
    generator = torch.Generator().manual_seed(seed)
    judged = torch.randint(0, 4, (count,), generator=generator).double()
    return (judged + torch.randint(-2, 3, (count,), generator=generator)).double(), judged


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows_at_once", [7, 512])
def test_it_is_somers_d_between_0_and_1(
    seed: int, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agreement of two orders is scipy's Somers' D, scaled to 0 to 1."""
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", rows_at_once)
    scores, judged = scores_of(seed)
    found = pair_agreement(scores, judged, ROWS)
    assert found.value == pytest.approx((somersd(judged.numpy(), scores.numpy()).statistic + 1) / 2)
    assert pair_agreement(-scores, judged, ROWS).value == pytest.approx(1 - found.value)


def test_of_right_and_wrong_it_is_mann_whitneys_u_over_the_pairs() -> None:
    scores, judged = scores_of(0)
    right = judged > 1
    u = mannwhitneyu(scores[right].numpy(), scores[~right].numpy()).statistic
    pairs = int(right.sum()) * int((~right).sum())
    assert pair_agreement(scores, right, ROWS).value == pytest.approx(u / pairs)


def test_four_rows_by_hand() -> None:
    """Right rows score 3 and 1, wrong ones 2 and 0: 3 > 2, 3 > 0, 1 < 2, 1 > 0, so 3 of 4 pairs agree.

    Each row has 2 pairs, of which 2, 1, 1 and 2 agree. Less their mean of 1.5 these are 0.5, −0.5, −0.5 and 0.5. The
    squares of a quarter of each sum to 4/64, and 4/3 corrects for 4 clusters.
    """
    scores, judged = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    found = pair_agreement(scores, judged, torch.arange(4))
    assert (found.value, found.num_clusters) == (0.75, 4)
    assert found.standard_error == pytest.approx(math.sqrt(4 / 64 * 4 / 3))


def test_the_error_is_that_of_resampled_prompts() -> None:
    """Each of 60 prompts has four equal responses. Rows that are resampled one by one would vary half as much."""
    generator = torch.Generator().manual_seed(3)
    judged = torch.randint(0, 2, (60,), generator=generator).double()
    scores = judged + torch.randn(60, generator=generator, dtype=torch.float64) * 1.5
    clusters = torch.arange(60).repeat_interleave(4)
    found = pair_agreement(scores[clusters], judged[clusters], clusters)
    chance, resampled = np.random.default_rng(0), []
    for _ in range(2000):
        drawn = chance.integers(0, 60, 60)
        right = judged.numpy()[drawn] > 0.5
        one, other = scores.numpy()[drawn][right], scores.numpy()[drawn][~right]
        resampled.append(
            np.mean(one[:, None] > other[None, :]) + 0.5 * np.mean(one[:, None] == other[None, :])
        )
    assert found.standard_error == pytest.approx(np.std(resampled), rel=0.1)


def test_a_judge_that_tells_nothing_apart_is_undefined() -> None:
    found = pair_agreement(torch.arange(3.0), torch.ones(3), torch.arange(3))
    assert math.isnan(found.value) and math.isnan(found.standard_error)
    assert math.isnan(
        pair_agreement(
            torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long)
        ).standard_error
    )
    with pytest.raises(ValueError, match="judged has shape"):
        pair_agreement(torch.arange(3.0), torch.ones(2), torch.arange(3))
    with pytest.raises(ValueError, match="one row or more"):
        pair_agreement(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.long))
