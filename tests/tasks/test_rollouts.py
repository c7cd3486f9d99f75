"""What a response is paid as a whole: moments, clip and length, in this order."""

import pytest
import torch

from algorithms.rewards import RunningMoments
from models.sequences import collate
from schemas.algorithm import Returns
from tasks.rollouts import Sampled, Scored, scale
from tasks.scoring import Scores


def scored(scores: list[float], lengths: list[int], *, ended: bool = True) -> Scored:
    total = torch.tensor(scores)
    return Scored(
        sampled=Sampled(
            prompts=["p"] * len(scores),
            answers=[None] * len(scores),
            responses=["r"] * len(scores),
            sequences=collate([[1]] * len(scores), [[7] * length for length in lengths], pad_token_id=0),
            ended=torch.full((len(scores),), ended),
        ),
        scores=Scores(total=total, weighted_sum=total, by_term={}),
    )


@pytest.mark.parametrize("ended", [True, False])
def test_the_overlong_penalty_is_that_of_dapo(ended: bool) -> None:
    """Eq. 13 with L_max = 20 and a buffer of 0.2 · 20 = 4: from 16 tokens on, a quarter a token; finished or not."""
    lengths = [1, 15, 16, 17, 18, 19, 20]
    paid = scale(scored([1.0] * 7, lengths, ended=ended), Returns(overlong_buffer=0.2), None, max_length=20)
    assert paid.tolist() == [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_the_numbers_of_the_paper() -> None:
    """16,384 tokens are free and 4,096 more cost 1 (DAPO §4.1, there with L_max = 20,480)."""
    paid = scale(
        scored([0.0] * 4, [16_384, 16_385, 18_432, 20_480]),
        Returns(overlong_buffer=0.2),
        None,
        max_length=20_480,
    )
    assert paid.tolist() == pytest.approx([0.0, -1 / 4096, -0.5, -1.0])


def test_a_buffer_of_less_than_a_token_is_one_token() -> None:
    paid = scale(scored([0.0] * 3, [1, 2, 3]), Returns(overlong_buffer=0.01), None, max_length=3)
    assert paid.tolist() == [0.0, 0.0, -1.0]


def test_a_buffer_is_a_whole_number_of_tokens() -> None:
    """0.3 · 9 = 2.7 tokens are 3."""
    paid = scale(scored([0.0] * 4, [6, 7, 8, 9]), Returns(overlong_buffer=0.3), None, max_length=9)
    assert paid.tolist() == pytest.approx([0.0, -1 / 3, -2 / 3, -1.0])


def test_scores_are_scaled_then_clipped_then_shortened() -> None:
    """(3 − 1)/2 = 1 is clipped to 0.5; −1 for the length comes after the clip, and is not clipped."""
    moments = RunningMoments(count=4, mean=1.0, m2=16.0)
    returns = Returns(reward_scaling="normalise", reward_clip=0.5, overlong_buffer=0.5)
    paid = scale(scored([3.0, 0.5, 3.0], [1, 1, 4]), returns, moments, max_length=4)
    assert paid.tolist() == [0.5, -0.25, -0.5]


def test_scaling_alone_keeps_the_mean() -> None:
    moments = RunningMoments(count=4, mean=1.0, m2=16.0)
    paid = scale(scored([3.0, -1.0], [1, 1]), Returns(reward_scaling="scale"), moments, max_length=4)
    assert paid.tolist() == [1.5, -0.5]


def test_without_switches_scores_stay_as_they_are() -> None:
    assert scale(scored([3.0, -1.0], [1, 4]), Returns(), None, max_length=4).tolist() == [3.0, -1.0]
