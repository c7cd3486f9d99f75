"""Running moments of scores, and the scores that are scaled by them, are right."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.rewards import RunningMoments, scale_scores

scores_lists = st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=6), min_size=1, max_size=6)


def as_tensor(scores):
    return torch.tensor(scores, dtype=torch.float64)


def assert_moments_of(moments, scores):
    """Assert that the moments equal NumPy's over the whole list."""
    assert moments.count == len(scores)
    if scores:
        scale = max(1.0, max(abs(score) for score in scores))
        assert moments.mean == pytest.approx(np.mean(scores), rel=1e-12, abs=1e-12 * scale)
        assert moments.std == pytest.approx(np.std(scores), rel=1e-9, abs=1e-9 * scale)


def test_by_hand():
    """Running moments of scores equal those worked out in the comment."""
    # 1, 3: mean 2, m2 1 + 1. Then 5, 7: of all four the mean is 4 and m2 9 + 1 + 1 + 9, so σ = √5.
    moments = RunningMoments().update(torch.tensor([1.0, 3.0]))
    assert moments == RunningMoments(count=2, mean=2.0, m2=2.0) and moments.std == 1.0
    assert moments.update(torch.tensor([5.0, 7.0])) == RunningMoments(count=4, mean=4.0, m2=20.0)
    assert moments.update(torch.tensor([5.0, 7.0])).std == pytest.approx(math.sqrt(5))


@settings(max_examples=80)
@given(pieces=scores_lists)
def test_pieces_give_the_moments_of_the_whole(pieces):
    moments = RunningMoments()
    for piece in pieces:
        moments = moments.update(as_tensor(piece))
    assert_moments_of(moments, [score for piece in pieces for score in piece])


@settings(max_examples=80)
@given(earlier=st.lists(st.floats(-1e3, 1e3), max_size=5), ranks=scores_lists, seed=st.integers(0, 2**32 - 1))
def test_ranks_merge_in_any_order_into_the_moments_of_all(earlier, ranks, seed):
    order = np.random.default_rng(seed).permutation(len(ranks))
    of_rollout = RunningMoments()
    for rank in order:
        of_rollout = of_rollout.merge(RunningMoments().update(as_tensor(ranks[rank])))
    everything = earlier + [score for rank in ranks for score in rank]
    before = RunningMoments().update(as_tensor(earlier))
    assert_moments_of(before.merge(of_rollout), everything)
    assert_moments_of(of_rollout.merge(before), everything)


def test_float32_scores_far_from_0_keep_their_spread():
    # E[R²] − E[R]² in float32 would be rounding noise here.
    scores = (1e5 + np.random.default_rng(0).normal(size=1000)).astype(np.float32)
    moments = RunningMoments()
    for piece in np.split(scores, 20):
        moments = moments.update(torch.tensor(piece))
    assert moments.std == pytest.approx(np.std(scores.astype(np.float64)), rel=1e-9)


@pytest.mark.parametrize("score", [0.1, -1.0, 1e6 + 0.1])
def test_equal_scores_have_a_spread_of_exactly_0_in_any_pieces(score):
    moments = RunningMoments()
    for size in (3, 1, 7):
        moments = moments.update(torch.full((size,), score, dtype=torch.float64))
    assert (moments.count, moments.m2, moments.std) == (11, 0.0, 0.0)


def test_fewer_than_two_scores_have_no_spread():
    assert RunningMoments().std == 0.0
    assert RunningMoments().update(torch.tensor([5.0])).std == 0.0
    assert RunningMoments(count=4, mean=1.0, m2=2.0).update(torch.zeros(0)) == RunningMoments(4, 1.0, 2.0)


def test_moments_survive_json_to_the_last_bit():
    moments = RunningMoments().update(torch.tensor([0.1, 0.7, -1 / 3]))
    assert RunningMoments(**json.loads(json.dumps(asdict(moments)))) == moments


def test_they_come_from_tensors_of_any_shape_type_and_graph():
    """Moments come from tensors of any shape and type, with or without a gradient."""
    expected = RunningMoments(count=4, mean=2.5, m2=5.0)
    scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    assert RunningMoments().update(scores) == expected
    assert RunningMoments().update(scores.bfloat16()) == expected
    assert RunningMoments().update(torch.tensor([1, 2, 3, 4])) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match=f"scores has {bad}, which would never leave the running moments"):
        RunningMoments().update(torch.tensor([1.0, bad]))


def test_scale_and_normalise_by_hand():
    # μ = 4, σ = 2. Clipped at ±1.5.
    moments = RunningMoments(count=2, mean=4.0, m2=8.0)
    scores = torch.tensor([2.0, 6.0, 10.0, -1.0], requires_grad=True)
    assert scale_scores(scores, moments, subtract_mean=False, clip=None).tolist() == [1.0, 3.0, 5.0, -0.5]
    normalised = scale_scores(scores, moments, subtract_mean=True, clip=None)
    assert normalised.tolist() == [-1.0, 1.0, 3.0, -2.5] and not normalised.requires_grad
    clipped = scale_scores(scores, moments, subtract_mean=True, clip=1.5)
    assert clipped.tolist() == [-1.0, 1.0, 1.5, -1.5]


@settings(max_examples=50)
@given(
    scores=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=8, unique=True),
    subtract_mean=st.booleans(),
    clip=st.one_of(st.none(), st.floats(0.1, 3)),
)
def test_scaling_is_its_formula(scores, subtract_mean, clip):
    """Scaled scores equal the formula on random scores."""
    mean, std = np.mean(scores), np.std(scores)
    if std < 1e-3:
        return
    moments = RunningMoments().update(as_tensor(scores))
    measured = scale_scores(as_tensor(scores), moments, subtract_mean=subtract_mean, clip=clip)
    expected = (np.array(scores) - (mean if subtract_mean else 0)) / std
    if clip is not None:
        expected = np.minimum(np.maximum(expected, -clip), clip)
    np.testing.assert_allclose(measured.numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("score", [0.1, -1.0, 3.0])
@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_scores_without_a_spread_keep_their_size_and_lose_their_mean(score, noise):
    scores = torch.tensor([score, score + noise, score], dtype=torch.float64)
    moments = RunningMoments().update(scores)
    scaled = scale_scores(scores, moments, subtract_mean=False, clip=None)
    np.testing.assert_allclose(scaled.numpy(), scores.numpy())
    normalised = scale_scores(scores, moments, subtract_mean=True, clip=None)
    np.testing.assert_allclose(normalised.numpy(), 0, atol=1e-8)


def test_scores_are_widened_and_nan_is_not_hidden():
    moments = RunningMoments(count=2, mean=0.0, m2=2.0)
    half = scale_scores(torch.ones(2, dtype=torch.bfloat16), moments, subtract_mean=False, clip=None)
    assert half.dtype == torch.float32
    broken = scale_scores(torch.tensor([math.nan, 1.0]), moments, subtract_mean=True, clip=0.5)
    assert broken.isnan().tolist() == [True, False]


def test_scaling_refusals():
    """Wrong settings of the scaling are refused by message."""
    scores, moments = torch.ones(2), RunningMoments(count=2, mean=0.0, m2=2.0)
    with pytest.raises(ValueError, match="moments has seen no score; update it with these scores"):
        scale_scores(scores, RunningMoments(), subtract_mean=True, clip=None)
    for clip in (0.0, -0.3, math.nan):
        with pytest.raises(ValueError, match=f"clip={clip} is not positive; use None for no clip"):
            scale_scores(scores, moments, subtract_mean=True, clip=clip)
