"""GDPO normalises each score within its group, then the weighted sum over the batch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.gdpo_cases import COUNT, gdpo_case, shown
from vantage.algorithms.advantages import (
    each_group_normalised,
    group_normalised,
    over_tokens,
    whiten_by_sample,
)

BY_VERL = Path(__file__).with_name("gdpo_by_verl.json")


def test_a_thousand_rollouts_by_verl() -> None:
    """The rollouts have groups of unequal size in any order, and scores that are equal in a whole group."""
    record = json.loads(BY_VERL.read_text())
    assert len(record["advantages"]) == COUNT
    for number, recorded in enumerate(record["advantages"]):
        case = gdpo_case(number)
        summed = each_group_normalised(case.scores, torch.tensor(case.weights).double(), case.groups)
        found = whiten_by_sample(over_tokens(summed, case.mask), case.mask)
        assert shown(found, case) == pytest.approx(recorded, rel=1e-6, abs=1e-6), number


def test_two_scores_by_hand() -> None:
    """The first score has deviations −1 and 1 and standard deviation √2, so it gives ∓0.7071. The second score, 100
    times as large, gives ±0.7071. With weights 2 and −0.5 the sum is ∓2.5 · 0.7071."""
    scores = torch.tensor([[0.0, 300.0], [2.0, 100.0]])
    found = each_group_normalised(scores, torch.tensor([2.0, -0.5]), torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([-2.5 / 2**0.5, 2.5 / 2**0.5], rel=1e-5)
    # were the scores added first, the second one alone would decide the sign
    assert group_normalised(scores @ torch.tensor([1.0, 1.0]), torch.tensor([0, 0]))[0] > 0


def test_sums_that_are_equal_keep_their_contrast() -> None:
    """(1, 0), (0, 1) and (0, 1) sum to 1 each: GRPO learns nothing from them."""
    scores, ids = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0, 0])
    assert group_normalised(scores.sum(1), ids).tolist() == [0.0, 0.0, 0.0]
    found = each_group_normalised(scores, torch.tensor([2.0, 1.0]), ids)
    assert found[0] > 0 > found[1] == found[2]


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_an_oracle_in_float64(groups: int, samples: int, names: int, random: Any) -> None:
    """Advantages equal those of a loop over groups in float64."""
    scores = np.array(
        [[random.choice([0, 0.5, 1, 3, -7]) for _ in range(names)] for _ in range(groups * samples)], float
    )
    weights = np.array([random.uniform(-2, 2) for _ in range(names)])
    expected = np.zeros(len(scores))
    for start in range(0, len(scores), samples):
        group = scores[start : start + samples]
        spread = group.std(axis=0, ddof=1)
        expected[start : start + samples] = ((group - group.mean(axis=0)) / (spread + 1e-6)) @ weights
    order = np.array(random.sample(range(len(scores)), len(scores)))
    ids = torch.tensor(np.arange(len(scores)) // samples)
    found = each_group_normalised(torch.tensor(scores), torch.tensor(weights), ids)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)
    shuffled = each_group_normalised(torch.tensor(scores[order]), torch.tensor(weights), ids[order])
    np.testing.assert_allclose(shuffled.numpy(), expected[order], atol=1e-9)


def test_named_scores_that_are_equal_but_for_their_own_rounding_add_nothing() -> None:
    """The rounding is that of the scores' type: two neighbours in float32 near 300 are equal, and in float64 they are not."""
    scores = torch.tensor([[300.0, 0.0], [300.0, 2.0]])
    scores[0, 0] = torch.nextafter(scores[0, 0], torch.tensor(torch.inf))
    groups, weights = torch.tensor([0, 0]), torch.tensor([1.0, 1.0])
    assert each_group_normalised(scores[:, :1], weights[:1], groups).tolist() == [0.0, 0.0]
    found = each_group_normalised(scores, weights, groups)
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5), "of the second alone"
    assert (each_group_normalised(scores.double(), weights, groups) != found).all()


def test_scores_of_a_group_that_are_equal_but_for_rounding_teach_nothing() -> None:
    """The first group's scores are sums of the same three terms in two orders. Scores of other groups really differ."""
    one, other = (sum(map(torch.tensor, order)).item() for order in ([19.2, 12.8, 12.8], [12.8, 12.8, 19.2]))
    assert one != other
    scores = torch.tensor([one, other, one, -1.0, -2.0, 1e-9, 1.1e-9])
    found = group_normalised(scores, torch.tensor([5, 5, 5, 2, 2, 9, 9]))
    assert found[:3].tolist() == [0.0, 0.0, 0.0]
    assert found[3:5].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-5)
    assert found[5] < 0 < found[6], "small numbers that differ"


def test_whitening_by_the_sample_s_variance() -> None:
    """1, 2, 3 have variance 1 with ddof 1; what is masked changes nothing."""
    advantages = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
    mask = torch.tensor([[True, True], [True, False]])
    assert whiten_by_sample(advantages, mask).tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    one = torch.tensor([[True, False]])
    assert whiten_by_sample(torch.tensor([[5.0, 1.0]]), one).tolist() == [[0.0, 0.0]]
    with pytest.raises(ValueError, match="no True element"):
        whiten_by_sample(torch.zeros(1, 2), torch.zeros(1, 2).bool())


def test_shapes_are_equal() -> None:
    """Tensors of unequal shapes are refused."""
    with pytest.raises(ValueError, match=r"weights has shape \(3,\)"):
        each_group_normalised(torch.zeros(4, 2), torch.zeros(3), torch.zeros(4, dtype=torch.int64))
