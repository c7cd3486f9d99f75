"""A response that has not ended counts as cut off in a stage's metrics."""

import pytest
import torch

from vantage.models.sequences import collate
from vantage.tasks.rewards.scoring import Scores
from vantage.tasks.rollout.rollouts import Sampled, Scored
from vantage.tasks.updates.own_responses import describe_responses


def test_a_response_that_has_not_ended_was_cut_off() -> None:
    """One of four responses has not ended. Their lengths are 1, 2, 3 and 4."""
    sequences = collate([[1]] * 4, [[5] * length for length in (1, 2, 3, 4)], pad_token_id=0)
    sampled = Sampled(
        prompts=["p"] * 4,
        answers=[None] * 4,
        responses=[""] * 4,
        sequences=sequences,
        ended=torch.tensor([True, True, True, False]),
        sampler_logprobs=torch.zeros(sequences.response_ids.shape),
    )
    totals = torch.tensor([1.0, 0.0, 2.0, -1.0])
    described = describe_responses(Scored(sampled, Scores(total=totals, weighted_sum=totals, by_term={})))
    assert described["truncated_share"] == 0.25
    assert described["response_length_mean"] == 2.5
    assert described["score_mean"] == pytest.approx(0.5)
