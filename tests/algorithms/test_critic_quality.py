"""Measures of a critic's quality equal hand-worked values, and loops over single tokens in plain floats."""

import math
from itertools import combinations
from statistics import fmean, pvariance

import pytest
import torch

from tests.algorithms.test_critic_slices import random_batch, tokens
from vantage.algorithms.critic_quality import (
    calibration,
    calibration_error,
    prompt_errors,
    prompt_parts,
    rank_correlation,
    squared_advantages,
)
from vantage.algorithms.critic_slices import by_difficulty, by_length, by_part, by_tokens_left

ALL = (prompt_parts, prompt_errors, calibration, rank_correlation, squared_advantages)


def explained(pairs):
    """Return 1 − Var(G − V)/Var(G) of (V, G) pairs."""
    return 1 - pvariance([g - v for v, g in pairs]) / pvariance([g for _, g in pairs])


def test_rank_correlation_by_hand():
    """The rank correlation within prompts equals the one worked out in the comment."""
    # Prompt 4 has returns 1, 0, 0 and values 0.9, 0.1, 0.5: two pairs have an order, both right. Prompt 9 has 0, 1
    # and values 0.3, 0.2: wrong. (2 − 1)/3. V is read at token ⌊L/2⌋: 1 of 2 and 1 of 3.
    values = torch.tensor([[9, 0.9, 9], [9, 0.1, 9], [9, 0.5, math.nan], [9, 0.3, 9], [9, 0.2, math.nan]])
    returns = torch.tensor([[1.0], [0.0], [0.0], [0.0], [1.0]]).expand(5, 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]]).bool()
    prompts = torch.tensor([4, 4, 4, 9, 9])
    found = rank_correlation(values, returns, mask, prompts)
    assert (found.value, found.num_clusters, found.num_rows) == (pytest.approx(1 / 3), 2, 3)
    assert rank_correlation(values, returns, mask, torch.arange(5)) is None
    assert rank_correlation(values, torch.zeros(5, 3), mask, prompts) is None
    equal = torch.zeros(5, 3)
    assert rank_correlation(equal, returns, mask, prompts).value == 0.0


def test_squared_advantages_by_hand():
    """Mean squared advantages of each baseline equal those worked out in the comments."""
    # Two prompts with two responses of one token each and one of two; the others' mean is that of the first returns
    returns = torch.tensor([[1.0, math.nan], [3.0, math.nan], [0.0, 2.0], [4.0, math.nan]])
    values = torch.tensor([[0.5, math.nan], [3.0, math.nan], [1.0, 1.0], [4.0, math.nan]])
    mask, prompts = torch.tensor([[1, 0], [1, 0], [1, 1], [1, 0]]).bool(), torch.tensor([0, 0, 1, 1])
    found = squared_advantages(values, returns, mask, prompts)
    assert found.critic.value == pytest.approx((0.25 + 0 + 1 + 1 + 0) / 5)
    assert found.batch_mean.value == pytest.approx((1 + 1 + 4 + 0 + 4) / 5)  # the mean is 2
    # 1 − 3, 3 − 1, 0 − 4, 2 − 4, 4 − 0
    assert found.others_mean.value == pytest.approx((4 + 4 + 16 + 4 + 16) / 5)
    assert squared_advantages(values, returns, mask, torch.arange(4)).others_mean is None


def test_one_prompt_with_a_single_response_leaves_the_others_mean_undefined():
    """If this prompt were left out, the mean would be over other tokens than the critic's."""
    ones, prompts = torch.ones(3, 1), torch.tensor([0, 0, 1])
    assert squared_advantages(ones, ones, ones.bool(), prompts).others_mean is None


@pytest.mark.parametrize("seed", range(4))
def test_the_order_within_a_prompt_is_what_a_loop_over_pairs_says(seed):
    values, returns, mask, prompts = random_batch(seed)
    returns = (returns * 2).round()  # some are tied
    for at in (0.0, 0.5, 1.0):
        agreeing, pairs = 0, 0
        for one, other in combinations(range(len(prompts)), 2):
            if prompts[one] == prompts[other]:
                places = [
                    min(int(at * int(mask[row].sum())), int(mask[row].sum()) - 1) for row in (one, other)
                ]
                g, h = (returns[row, place].item() for row, place in zip((one, other), places, strict=True))
                v, w = (values[row, place].item() for row, place in zip((one, other), places, strict=True))
                if g != h:
                    pairs += 1
                    agreeing += 1 if (g > h) == (v > w) else -1
        found = rank_correlation(values, returns, mask, prompts, at=at)
        assert (found.value, found.num_rows) == (pytest.approx(agreeing / pairs), pairs)


@pytest.mark.parametrize("seed", range(4))
def test_between_and_within_prompts_by_loops(seed):
    batch = random_batch(seed)
    prompts = batch[3].tolist()
    by_prompt = {}
    for row, _, _, value, target in tokens(batch):
        by_prompt.setdefault(prompts[row], []).append((value, target))
    between, within = [], []
    for prompt, pairs in by_prompt.items():
        v, g = (fmean(side) for side in zip(*pairs, strict=True))
        between += [(v, g)] * len(pairs)
        if prompts.count(prompt) > 1:
            within += [(value - v, target - g) for value, target in pairs]
    found = prompt_parts(*batch)
    assert found.between.value == pytest.approx(explained(between))
    assert found.within.value == pytest.approx(explained(within))


def test_a_critic_of_prompts_explains_between_them_and_not_within():
    returns = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    values = torch.tensor([[2.0], [2.0], [6.0], [6.0]])
    mask, prompts = torch.ones(4, 1).bool(), torch.tensor([0, 0, 1, 1])
    found = prompt_parts(values, returns, mask, prompts)
    assert (found.between.value, found.within.value) == (1.0, 0.0)
    alone = prompt_parts(values, returns, mask, torch.arange(4))
    assert alone.within is None
    # without the prompts, 1 − Var(±1)/Var(1, 3, 5, 7) = 1 − 1/5
    assert alone.between.value == pytest.approx(0.8)


def test_equal_returns_leave_nothing_to_explain():
    """0.1 has no exact mean: the variance of equal numbers has to be 0 all the same."""
    returns, mask = torch.full((6, 7), 0.1), torch.ones(6, 7).bool()
    values, prompts = torch.randn(6, 7), torch.tensor([0, 0, 0, 1, 1, 1])
    found = prompt_parts(values, returns, mask, prompts)
    assert math.isnan(found.between.value) and math.isnan(found.within.value)
    assert rank_correlation(values, returns, mask, prompts) is None
    squares = squared_advantages(values, returns, mask, prompts)
    assert (squares.ratio, squares.batch_mean.value) == (None, 0.0)
    assert all(math.isnan(each.share) for each in prompt_errors(returns, returns, mask, prompts))


def test_prompt_errors_by_hand():
    """The critic's error on each prompt equals the one worked out by hand."""
    returns = torch.tensor([[1.0, 1.0], [0.0, math.nan], [4.0, math.nan]])
    values = torch.tensor([[0.0, 2.0], [2.0, math.nan], [4.5, math.nan]])
    mask, prompts = torch.tensor([[1, 1], [1, 0], [1, 0]]).bool(), torch.tensor([8, 8, 3])
    good, bad = prompt_errors(values, returns, mask, prompts)
    assert (good.prompt, good.num_responses, good.value, good.returned) == (3, 1, 4.5, 4.0)
    assert (good.squared_error, good.share) == (0.25, 0.04)
    assert (bad.prompt, bad.num_responses, bad.squared_error, bad.share) == (8, 2, 2.0, 0.96)
    assert (bad.value, bad.returned) == (pytest.approx(4 / 3), pytest.approx(2 / 3))


def test_calibration_by_hand():
    """Bins of a critic's calibration equal those worked out in the comment."""
    # In the order of their values: 0, 1 | 2, 3; the returns are 0, 4 | 1, 1
    values = torch.tensor([[1.0, 3.0], [0.0, 2.0]])
    returns = torch.tensor([[4.0, 1.0], [0.0, 1.0]])
    low, high = calibration(values, returns, torch.ones(2, 2).bool(), torch.arange(2), num_bins=2)
    assert (low.value, low.returned.value, low.error.value, low.num_tokens) == (0.5, 2.0, -1.5, 2)
    assert (high.value, high.returned.value, high.error.value, high.num_tokens) == (2.5, 1.0, 1.5, 2)
    assert calibration_error([low, high]) == 1.5


@pytest.mark.parametrize("seed", range(4))
def test_calibration_by_a_loop(seed):
    """Bins of a critic's calibration equal those of a loop over tokens."""
    batch = random_batch(seed)
    ordered = sorted((value, target) for _, _, _, value, target in tokens(batch))
    n = len(ordered)
    expected = {}
    for rank, pair in enumerate(ordered):
        expected.setdefault(int(10 * (rank + 0.5) / n), []).append(pair)
    found = calibration(*batch)
    assert [each.num_tokens for each in found] == [len(pairs) for pairs in expected.values()]
    for each, pairs in zip(found, expected.values(), strict=True):
        assert each.value == pytest.approx(fmean(v for v, _ in pairs))
        assert each.returned.value == pytest.approx(fmean(g for _, g in pairs))
        assert each.error.value == pytest.approx(fmean(v - g for v, g in pairs))


def test_a_constant_critic_has_one_bin():
    returns = torch.tensor([[1.0], [3.0]])
    [only] = calibration(torch.full((2, 1), 2.0), returns, torch.ones(2, 1).bool(), torch.arange(2))
    assert (only.value, only.error.value, only.num_tokens) == (2.0, 0.0, 2)


def test_the_ratio_of_a_constant_critic_is_one_and_of_a_perfect_one_zero():
    values, returns, mask, prompts = random_batch(3)
    mean = returns[mask].mean()
    assert squared_advantages(mean.expand(values.shape), returns, mask, prompts).ratio.value == pytest.approx(
        1
    )
    assert squared_advantages(returns, returns, mask, prompts).ratio.value == 0.0


def numbers(found):
    """Return all numbers in a result, in its order."""
    if isinstance(found, (int, float)):
        return [found]
    parts = (
        found if isinstance(found, list | tuple | dict) else vars(found).values() if found is not None else []
    )
    return [number for part in parts for number in numbers(part)]


@pytest.mark.parametrize("measure", ALL)
def test_neither_the_order_of_rows_nor_padding_changes_a_number(measure):
    values, returns, mask, prompts = random_batch(7)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1))
    pad = torch.nn.functional.pad
    wider = [pad(values, (0, 4), value=math.nan), pad(returns, (0, 4), value=-math.inf), pad(mask, (0, 4))]
    changed = measure(*(each[order] for each in (*wider, prompts)))
    expected = numbers(measure(values, returns, mask, prompts))
    assert len(expected) > 3
    assert numbers(changed) == pytest.approx(expected, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("measure", ALL)
def test_an_empty_mask_and_other_shapes_are_refused(measure):
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match="has no True element"):
        measure(ones, ones, torch.zeros(2, 3).bool(), torch.arange(2))
    with pytest.raises(ValueError, match="values"):
        measure(torch.ones(2, 4), ones, ones.bool(), torch.arange(2))


def test_returns_that_differ_by_rounding_are_equal():
    """Returns of a KL penalty between equal policies differ by rounding, and a critic could explain any share of such
    noise.
    """
    returns, mask = 1 + 1e-7 * torch.randn(6, 7).double(), torch.ones(6, 7).bool()
    values, prompts = torch.randn(6, 7), torch.tensor([0, 0, 0, 1, 1, 1])
    found = prompt_parts(values, returns, mask, prompts)
    assert math.isnan(found.between.value) and math.isnan(found.within.value)
    assert rank_correlation(values, returns, mask, prompts) is None
    for slices in (by_part, by_tokens_left, by_length, by_difficulty):
        assert all(
            math.isnan(each.explained_variance.value) for each in slices(values, returns, mask, prompts)
        )
    assert [each.label for each in by_difficulty(values, returns, mask, prompts)] == ["middle"]
    returns[0] += 1e-3
    assert not math.isnan(prompt_parts(values, returns, mask, prompts).within.value)
