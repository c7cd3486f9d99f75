import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.rewards import (
    overlong_penalty,
    replace_missing_eos,
    shape_rewards,
    subtract_missing_eos,
    whiten_scores,
)


def test_shaped_rewards_by_hand():
    # β = 0.5. Row 0 ends at its third position, row 1 is truncated at T, row 2 has a gap.
    scores = torch.tensor([10.0, 20.0, 30.0])
    kl = torch.tensor([[1.0, -2.0, 4.0, math.nan], [0.0, 0.0, 0.0, 2.0], [2.0, math.inf, 6.0, math.nan]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 0]]).bool()
    assert shape_rewards(scores, kl, mask, kl_coef=0.5).tolist() == [
        [-0.5, 1.0, 10 - 2.0, 0.0],
        [0.0, 0.0, 0.0, 20 - 1.0],
        [-1.0, 0.0, 30 - 3.0, 0.0],
    ]


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), kl_coef=st.floats(0, 2))
def test_shaped_rewards_are_the_definition_and_lose_nothing(seed, kl_coef):
    rng = np.random.default_rng(seed)
    mask = rng.random((rng.integers(1, 6), rng.integers(1, 8))) < 0.6
    scores = np.where(mask.any(axis=1), rng.normal(size=len(mask)), math.nan)
    kl = np.where(mask, rng.normal(size=mask.shape), math.nan)
    measured = shape_rewards(
        torch.tensor(scores), torch.tensor(kl), torch.tensor(mask), kl_coef=kl_coef
    ).numpy()
    expected = np.zeros(mask.shape)
    for row in range(len(mask)):
        for t in np.flatnonzero(mask[row]):
            expected[row, t] = -kl_coef * kl[row, t]
        if mask[row].any():
            expected[row, np.flatnonzero(mask[row])[-1]] += scores[row]
    np.testing.assert_allclose(measured, expected, rtol=1e-12, atol=1e-15)


def test_more_padding_and_another_row_order_change_nothing():
    generator = torch.Generator().manual_seed(0)
    scores, kl = torch.randn(4, generator=generator), torch.randn(4, 5, generator=generator)
    mask = torch.arange(5) < torch.tensor([1, 5, 3, 2])[:, None]
    rewards = shape_rewards(scores, kl, mask, kl_coef=0.1)
    pad = torch.nn.functional.pad
    padded = shape_rewards(scores, pad(kl, (0, 2), value=math.nan), pad(mask, (0, 2)), kl_coef=0.1)
    assert torch.equal(padded, pad(rewards, (0, 2)))
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(shape_rewards(scores[order], kl[order], mask[order], kl_coef=0.1), rewards[order])


def test_rewards_pass_no_gradient():
    scores, kl = torch.ones(1, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    has_eos = torch.tensor([True])
    assert not shape_rewards(scores, kl, torch.ones(1, 2).bool(), kl_coef=0.1).requires_grad
    assert not subtract_missing_eos(scores, has_eos, penalty=1.0).requires_grad
    assert not replace_missing_eos(scores, has_eos, score=-1.0).requires_grad


def test_missing_eos_by_hand():
    scores, has_eos = torch.tensor([2.0, 3.0, -4.0]), torch.tensor([True, False, False])
    assert subtract_missing_eos(scores, has_eos, penalty=1.5).tolist() == [2.0, 1.5, -5.5]
    assert replace_missing_eos(scores, has_eos, score=-1.0).tolist() == [2.0, -1.0, -1.0]
    assert scores.tolist() == [2.0, 3.0, -4.0]


def test_overlong_penalty_by_hand():
    # At most 20 tokens, the last 4 of them a buffer: from 16 on it loses a quarter a token.
    lengths = torch.tensor([0, 1, 15, 16, 17, 18, 19, 20, 21, 400])
    penalty = overlong_penalty(lengths, max_length=20, buffer=4)
    assert penalty.tolist() == [0, 0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert penalty.dtype == torch.float32
    # DAPO's own numbers: 20,480 and 4,096, so 16,384 is free and 18,432 half way.
    paper = overlong_penalty(torch.tensor([16_384, 18_432, 20_480]), max_length=20_480, buffer=4_096)
    assert paper.tolist() == [0, -0.5, -1]


@settings(max_examples=60)
@given(length=st.integers(0, 60), max_length=st.integers(1, 50), share=st.floats(0.01, 1))
def test_overlong_penalty_is_its_three_cases(length, max_length, share):
    buffer = max(1, int(share * max_length))
    if length <= max_length - buffer:
        expected = 0.0
    elif length <= max_length:
        expected = ((max_length - buffer) - length) / buffer
    else:
        expected = -1.0
    measured = overlong_penalty(torch.tensor([length]), max_length=max_length, buffer=buffer).item()
    assert measured == pytest.approx(expected, rel=1e-6)


def test_overlong_penalty_refusals():
    """Wrong settings of the penalty of long responses are refused by message."""
    lengths = torch.tensor([3, -2])
    for buffer in (0, -1, 21):
        with pytest.raises(
            ValueError, match=f"buffer={buffer} must be positive and no more than max_length=20"
        ):
            overlong_penalty(lengths, max_length=20, buffer=buffer)
    with pytest.raises(ValueError, match="lengths has -2; a length is a number of response tokens"):
        overlong_penalty(lengths, max_length=20, buffer=4)


def test_refusals():
    """Wrong arguments of shaped rewards are refused by message."""
    scores, has_eos = torch.zeros(2), torch.tensor([True, False])
    with pytest.raises(ValueError, match=r"penalty=-1.0 is subtracted .* so it must be ≥ 0"):
        subtract_missing_eos(scores, has_eos, penalty=-1.0)
    with pytest.raises(TypeError, match=r"has_eos has dtype torch.int64; it must be torch.bool"):
        replace_missing_eos(scores, has_eos.long(), score=0.0)
    with pytest.raises(ValueError, match=r"has_eos has shape \(2,\); it must be \(3,\)"):
        subtract_missing_eos(torch.zeros(3), has_eos, penalty=1.0)
    with pytest.raises(ValueError, match=r"scores has shape \(3,\); it must be \(2,\)"):
        shape_rewards(torch.zeros(3), torch.zeros(2, 4), torch.ones(2, 4).bool(), kl_coef=0.1)


def test_whitened_scores_by_hand() -> None:
    """1, 2, 3 and 6 have mean 3 and variance 3.5; equal ones have no scale."""
    found = whiten_scores(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    torch.testing.assert_close(found, torch.tensor([-2.0, -1.0, 0.0, 3.0]) / 3.5**0.5)
    assert whiten_scores(torch.tensor([0.1, 0.1, 0.1])).tolist() == [0.0, 0.0, 0.0]
    assert whiten_scores(torch.tensor([5.0])).tolist() == [0.0]
