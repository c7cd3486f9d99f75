"""Advantages of whole responses, against their group and against the greedy response, equal the definition and hand-worked values."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.advantages import (
    greedy_baseline,
    group_mean_baseline,
    group_normalised,
    leave_one_out,
    over_tokens,
)

AGAINST_GROUP = [leave_one_out, group_mean_baseline, group_normalised]
every_kind = pytest.mark.parametrize("advantage", AGAINST_GROUP, ids=lambda kind: kind.__name__)
seeds = st.integers(0, 2**32 - 1)


def random_groups(seed):
    """Return scores with repetitions, and ids of groups of any size, in any order."""
    rng = np.random.default_rng(seed)
    num_rows = rng.integers(1, 12)
    ids = rng.choice(rng.integers(-(10**12), 10**12, size=4), size=num_rows)
    return np.round(rng.normal(scale=2, size=num_rows), 1), ids


def by_definition(kind, scores, ids):
    """Compute the advantages from their definition, one row at a time, in plain Python."""
    advantages = []
    for i, own in enumerate(ids):
        group = [float(score) for score, other in zip(scores, ids, strict=True) if other == own]
        others = [float(scores[j]) for j in range(len(ids)) if ids[j] == own and j != i]
        mean, advantage = math.fsum(group) / len(group), 0.0
        if kind is leave_one_out and others:
            advantage = float(scores[i]) - math.fsum(others) / len(others)
        if kind is group_mean_baseline:
            advantage = float(scores[i]) - mean
        if kind is group_normalised and others:
            variance = math.fsum((score - mean) ** 2 for score in group) / (len(group) - 1)
            advantage = (float(scores[i]) - mean) / (math.sqrt(variance) + 1e-6)
        advantages.append(advantage)
    return advantages


@every_kind
@settings(max_examples=60)
@given(seed=seeds)
def test_it_is_the_definition(advantage, seed):
    """Advantages of random groups equal those of the definition."""
    scores, ids = random_groups(seed)
    measured = advantage(torch.tensor(scores), torch.tensor(ids))
    np.testing.assert_allclose(measured.numpy(), by_definition(advantage, scores, ids), rtol=1e-9, atol=1e-9)


def test_by_hand():
    """Advantages against the group equal those worked out in the comments."""
    # Prompt 5 has the scores 1, 2, 6: mean 3, deviations −2, −1, 3, variance (4 + 1 + 9)/2 = 7.
    # Prompt −1 has 9 and 5: mean 7, deviations 2, −2, variance (4 + 4)/1 = 8. Prompt 0 has one response.
    scores = torch.tensor([1.0, 9.0, 2.0, 4.0, 6.0, 5.0])
    ids = torch.tensor([5, -1, 5, 0, 5, -1])
    # Against the mean of the others: 1 − 4, 2 − 3.5, 6 − 1.5; 9 − 5, 5 − 9.
    assert leave_one_out(scores, ids).tolist() == [-3.0, 4.0, -1.5, 0.0, 4.5, -4.0]
    assert group_mean_baseline(scores, ids).tolist() == [-2.0, 2.0, -1.0, 0.0, 3.0, -2.0]
    expected = [-2 / 7**0.5, 2 / 8**0.5, -1 / 7**0.5, 0.0, 3 / 7**0.5, -2 / 8**0.5]
    np.testing.assert_allclose(group_normalised(scores, ids).numpy(), expected, rtol=1e-6)


@settings(max_examples=40)
@given(seed=seeds)
def test_leave_one_out_is_the_deviation_from_the_mean_times_k_over_k_minus_1(seed):
    scores, ids = random_groups(seed)
    sizes = np.array([(ids == own).sum() for own in ids])
    means = np.array([scores[ids == own].mean() for own in ids])
    expected = np.where(sizes > 1, sizes / np.maximum(sizes - 1, 1) * (scores - means), 0.0)
    measured = leave_one_out(torch.tensor(scores), torch.tensor(ids))
    np.testing.assert_allclose(measured.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_leave_one_out_gives_the_exact_policy_gradient_and_the_group_mean_a_smaller_one():
    # Two responses of one token from a vocabulary of three, all nine pairs enumerated: the baseline of the
    # other response leaves E[Σ_i A_i ∇log π(a_i)]/2 = ∇E[R], the mean with the response's own score shrinks it
    # by (K − 1)/K = ½.
    rewards = torch.tensor([1.0, -0.5, 3.0], dtype=torch.float64)
    logits = torch.tensor([0.2, 1.0, -0.4], dtype=torch.float64, requires_grad=True)
    probability = torch.softmax(logits, 0)
    expected = torch.autograd.grad(probability @ rewards, logits, retain_graph=True)[0]
    for advantage, share in ((leave_one_out, 1.0), (group_mean_baseline, 0.5)):
        total = torch.zeros((), dtype=torch.float64)
        for pair in itertools.product(range(3), repeat=2):
            tokens = torch.tensor(pair)
            weight = probability[tokens].prod().detach()
            advantages = advantage(rewards[tokens], torch.zeros(2, dtype=torch.int64))
            total = total + weight * (advantages * probability[tokens].log()).sum() / 2
        measured = torch.autograd.grad(total, logits, retain_graph=True)[0]
        np.testing.assert_allclose(measured.numpy(), share * expected.numpy(), rtol=1e-12)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e6 + 0.1, -7.7])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_equal_scores_and_a_group_of_one_give_exactly_0(advantage, dtype, score, size):
    ids = torch.tensor([4] * size + [1, 1])
    scores = torch.tensor([score] * size + [0.0, 1.0], dtype=dtype)
    measured = advantage(scores, ids)
    assert (measured[:size] == 0).all()
    assert measured[-1] > 0 > measured[-2]


@every_kind
@settings(max_examples=30)
@given(seed=seeds)
def test_row_order_names_of_groups_and_a_shift_change_nothing(advantage, seed):
    scores, ids = (torch.tensor(array) for array in random_groups(seed))
    expected = advantage(scores, ids)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        advantage(scores[order], -3 * ids[order] + 11), expected[order], rtol=0, atol=1e-12
    )
    torch.testing.assert_close(advantage(scores + 100, ids), expected, rtol=0, atol=1e-7)
    for own in ids.unique():
        assert abs(expected[ids == own].sum().item()) < 1e-9


@every_kind
def test_a_nan_stays_in_its_group(advantage):
    scores, ids = torch.tensor([math.nan, 1.0, 2.0, 4.0]), torch.tensor([0, 0, 1, 1])
    measured = advantage(scores, ids)
    assert measured.isnan().tolist() == [True, True, False, False]
    assert torch.equal(measured[2:], advantage(scores[2:], ids[2:]))


def test_the_scale_of_the_scores_leaves_normalised_advantages_as_they_are():
    scores, ids = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(
        group_normalised(1000 * scores, ids), group_normalised(scores, ids), rtol=1e-5, atol=0
    )


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_advantages_are_detached_in_float32_or_better(advantage, dtype):
    scores = torch.arange(6).to(dtype)
    measured = advantage(scores.requires_grad_() if dtype.is_floating_point else scores, torch.arange(6) // 2)
    assert measured.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not measured.requires_grad


def test_large_scores_of_a_large_group_are_summed_accurately():
    # In float32 a sum of 4096 scores near 1e4 would be off by whole units, and their mean by about 1e-3.
    scores = (1e4 + np.random.default_rng(0).normal(size=4096)).astype(np.float32)
    deviations = scores.astype(np.float64) - math.fsum(scores.tolist()) / 4096
    together = torch.zeros(4096, dtype=torch.int32)
    for advantage, scale in (
        (group_mean_baseline, 1),
        (leave_one_out, 4096 / 4095),
        (group_normalised, 1 / (math.sqrt(math.fsum(deviations**2) / 4095) + 1e-6)),
    ):
        measured = advantage(torch.tensor(scores), together)
        np.testing.assert_allclose(measured.numpy(), scale * deviations, rtol=1e-6)


@every_kind
def test_refusals(advantage):
    """Wrong arguments of response advantages are refused by message."""
    scores, ids = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"scores has shape \(3, 1\); it must be \(B,\)"):
        advantage(scores[:, None], ids)
    with pytest.raises(ValueError, match=r"group_ids has shape \(2,\); it must be \(3,\)"):
        advantage(scores, ids[:2])
    with pytest.raises(TypeError, match=r"group_ids has dtype torch.float32; it must be an integer type"):
        advantage(scores, ids.float())


@every_kind
def test_no_responses_have_no_advantages(advantage):
    assert advantage(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_greedy_baseline_by_hand():
    scores = torch.tensor([3.0, -1.0], requires_grad=True)
    measured = greedy_baseline(scores, torch.tensor([1.0, 0.5]))
    assert measured.tolist() == [2.0, -1.5] and not measured.requires_grad
    assert greedy_baseline(scores.bfloat16(), torch.zeros(2)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"greedy_scores has shape \(1,\); it must be \(2,\)"):
        greedy_baseline(scores, torch.zeros(1))
    with pytest.raises(ValueError, match=r"scores has shape \(2, 1\); it must be \(B,\)"):
        greedy_baseline(scores[:, None], torch.zeros(2, 1))


def test_over_tokens_by_hand():
    """An advantage of the response is given to each of its valid tokens."""
    # A gap in row 0; row 2 has no token, so its advantage, NaN as it is, goes nowhere.
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]]).bool()
    advantages = torch.tensor([2.0, -3.0, math.nan], requires_grad=True)
    measured = over_tokens(advantages, mask)
    assert measured.tolist() == [[2.0, 0.0, 2.0], [-3.0, -3.0, 0.0], [0.0, 0.0, 0.0]]
    assert not measured.requires_grad
    assert over_tokens(advantages.bfloat16(), mask).dtype == torch.float32
    with pytest.raises(ValueError, match=r"sequence_advantages has shape \(2,\); it must be \(3,\)"):
        over_tokens(advantages[:2], mask)
