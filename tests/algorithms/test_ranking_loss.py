import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.preference_loss import bradley_terry, rankable, ranking_loss


def random_rankings(seed):
    """Return scores, ranks with ties, and prompts of any size in any order; prompt 0 has an untied pair."""
    rng = np.random.default_rng(seed)
    num_completions = rng.integers(2, 12)
    prompts = np.concatenate([[0, 0], rng.integers(-3, 3, size=num_completions - 2)])
    ranks = np.concatenate([[0, 2], rng.integers(0, 3, size=num_completions - 2)])
    order = rng.permutation(num_completions)
    return rng.normal(size=num_completions), ranks[order], prompts[order]


def ranking_by_definition(scores, ranks, prompts):
    """Return loss, gradient, pairs, pairs in order and prompts with a pair, one pair at a time."""
    losses, num_pairs, num_right = [], 0, 0
    gradient = np.zeros(len(scores))
    slopes_of = {}
    for prompt in sorted(set(prompts)):
        own = [i for i in range(len(scores)) if prompts[i] == prompt]
        pairs = [
            (i, j) if ranks[i] < ranks[j] else (j, i)
            for i, j in itertools.combinations(own, 2)
            if ranks[i] != ranks[j]
        ]
        if pairs:
            gaps = [scores[better] - scores[worse] for better, worse in pairs]
            losses.append(sum(math.log1p(math.exp(-gap)) for gap in gaps) / len(pairs))
            slopes_of[prompt] = [
                (pair, 1 / (1 + math.exp(gap)) / len(pairs)) for pair, gap in zip(pairs, gaps, strict=True)
            ]
            num_pairs += len(pairs)
            num_right += sum(gap > 0 for gap in gaps)
    for slopes in slopes_of.values():
        for (better, worse), slope in slopes:
            gradient[better] -= slope / len(losses)
            gradient[worse] += slope / len(losses)
    return sum(losses) / len(losses), gradient, num_pairs, num_right, len(losses)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_value_gradient_and_counts_are_the_definition(seed):
    scores, ranks, prompts = random_rankings(seed)
    loss, gradient, num_pairs, num_right, num_prompts = ranking_by_definition(scores, ranks, prompts)
    leaf = torch.tensor(scores, requires_grad=True)
    ranks, prompts = torch.tensor(ranks), torch.tensor(prompts)
    result = ranking_loss(leaf, ranks, prompts)
    assert result.loss.item() == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(torch.autograd.grad(result.loss, leaf)[0].numpy(), gradient, atol=1e-14)
    assert (result.pair_accuracy.count.item(), result.pair_accuracy.sum.item()) == (num_pairs, num_right)
    assert result.score_gap.count == num_pairs
    assert rankable(ranks, prompts) == num_prompts


def test_by_hand():
    """The loss of rankings with ties equals the one worked out in the comment."""
    # Prompt 4: ranks 1, 1, 2: two untied pairs, weight ½ each, gaps ln 3 and −ln 3: (ln 4/3 + ln 4)/2.
    # Prompt 9: one pair, gap 0: ln 2. Prompt 5 is one completion, prompt 6 all ties: nothing. Mean over two.
    log3 = math.log(3)
    scores = torch.tensor([log3, -log3, 0.0, 1.0, 1.0, math.nan, math.nan, math.inf], dtype=torch.float64)
    ranks = torch.tensor([1, 1, 2, 8, 3, 0, 2, 2])
    prompts = torch.tensor([4, 4, 4, 9, 9, 5, 6, 6])
    leaf = scores.requires_grad_()
    result = ranking_loss(leaf, ranks, prompts)
    assert rankable(ranks, prompts) == 2
    assert result.loss.item() == pytest.approx(((math.log(4 / 3) + math.log(4)) / 2 + math.log(2)) / 2)
    # Ranked right: ln 3 above 0. Wrong: −ln 3 below it, and the tie of the scores 1 and 1.
    assert (result.pair_accuracy.sum.item(), result.pair_accuracy.count.item()) == (1, 3)
    assert result.score_gap.sum.item() == pytest.approx(0, abs=1e-12)
    # −σ(−gap)·weight/2: −¼·½/2, −¾·½/2 and their sum the other way; −½/2 on the better of prompt 9.
    gradient = torch.autograd.grad(result.loss, leaf)[0]
    np.testing.assert_allclose(
        gradient.numpy(), [-1 / 16, -3 / 16, 1 / 4, 1 / 4, -1 / 4, 0, 0, 0], rtol=1e-12
    )


def test_without_ties_it_is_the_loss_over_all_pairs_of_k_responses():
    # InstructGPT's 1/(K choose 2), K = 4: six pairs in one call of bradley_terry.
    scores = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64)
    pairs = list(itertools.combinations(range(4), 2))  # ranks 0 < 1 < 2 < 3
    better, worse = (scores[list(side)] for side in zip(*pairs, strict=True))
    measured = ranking_loss(scores, torch.arange(4), torch.zeros(4, dtype=torch.int64))
    assert measured.loss.item() == pytest.approx(bradley_terry(better, worse).loss.item(), rel=1e-12)


def test_two_completions_of_a_prompt_are_a_pair():
    chosen, rejected = torch.tensor([1.0, -2.0, 0.3]), torch.tensor([0.5, 1.0, 0.1])
    measured = ranking_loss(
        torch.cat([chosen, rejected]), torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2] * 2)
    )
    expected = bradley_terry(chosen, rejected)
    assert measured.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert measured.pair_accuracy == expected.pair_accuracy


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_only_the_order_of_the_ranks_matters_and_no_prompt_sees_another(seed):
    scores, ranks, prompts = (torch.tensor(array) for array in random_rankings(seed))
    expected = ranking_loss(scores, ranks, prompts)
    order = torch.randperm(len(ranks), generator=torch.Generator().manual_seed(seed))
    moved = ranking_loss(scores[order], ranks[order].double() ** 3 - 7, 5 - prompts[order])
    torch.testing.assert_close(moved.loss, expected.loss)
    shifted = ranking_loss(scores + 10.0 * prompts, ranks, prompts)  # a score's zero differs between prompts
    torch.testing.assert_close(shifted.loss, expected.loss)


def test_only_ties_give_0_in_a_micro_batch_and_are_refused_as_a_minibatch():
    leaf = torch.full((3,), math.nan, requires_grad=True)
    ranks, prompts = torch.tensor([1, 1, 2]), torch.tensor([0, 0, 1])
    assert rankable(ranks, prompts) == 0
    result = ranking_loss(leaf, ranks, prompts, denominator=4)
    assert result.loss == 0 and result.pair_accuracy.count == 0
    assert torch.autograd.grad(result.loss, leaf)[0].tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="no pair"):
        ranking_loss(leaf, ranks, prompts)
    empty = torch.zeros(0, dtype=torch.int64)
    assert rankable(empty, empty) == 0


def test_half_precision_is_widened():
    leaf = torch.tensor([1.0, 0.0], requires_grad=True)
    result = ranking_loss(leaf.bfloat16(), torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(math.log1p(math.exp(-1)), rel=1e-6)


def test_refusals():
    """Wrong arguments of the ranking loss are refused by message."""
    scores, ranks, prompts = torch.zeros(2), torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"scores has shape \(2, 1\); it must be \(N,\)"):
        ranking_loss(scores[:, None], ranks, prompts)
    with pytest.raises(ValueError, match=r"ranks has shape \(1,\); it must be \(2,\)"):
        ranking_loss(scores, ranks[:1], prompts)
    with pytest.raises(ValueError, match=r"group_ids has shape \(1,\); it must be \(2,\)"):
        ranking_loss(scores, ranks, prompts[:1])
    with pytest.raises(TypeError, match="group_ids has dtype torch.float32"):
        rankable(ranks, scores)
    with pytest.raises(ValueError, match=r"ranks has shape \(2, 1\); it must be \(N,\)"):
        rankable(ranks[:, None], prompts)
    with pytest.raises(ValueError, match="ranks has a NaN"):
        rankable(torch.tensor([0.0, math.nan]), prompts)
    with pytest.raises(ValueError, match=r"denominator=0.0 is not positive"):
        ranking_loss(scores, ranks, prompts, denominator=0)
