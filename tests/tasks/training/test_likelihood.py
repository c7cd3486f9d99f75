"""The gradient of a minibatch's mean NLL is over all its tokens, at the temperature asked for, whatever the micro-batch."""

import math
from typing import Any

import pytest
import torch

from tests.tasks.small_models import load
from vantage.models.folders import load_policy
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.training.likelihood import Likelihood, accumulate_nll

MINIBATCH = collate(
    [[1, 20, 21], [1, 22], [1, 23, 24, 25], [1, 20], [1, 27]],
    [[30, 31, 2], [32, 2], [33, 34, 35, 36, 2], [30, 30], [31, 2]],
    pad_token_id=0,
)


def gradient(
    pipeline: Any, *, microbatch_size: int | None = None, coef: float = 1.0
) -> tuple[Likelihood, torch.Tensor]:
    policy = load(pipeline.folder("sft"))
    likelihood = accumulate_nll(
        policy, MINIBATCH, temperature=0.8, limits=PassLimits(microbatch_size), precision="float32", coef=coef
    )
    return likelihood, torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_the_loss_is_the_mean_over_all_tokens_of_the_minibatch(pipeline: Any) -> None:
    """The loss equals one from full logits, one sequence at a time, in float64."""
    found, _ = gradient(pipeline)
    policy = load_policy(pipeline.folder("sft")).double()
    total, num_tokens = 0.0, 0
    for row in range(len(MINIBATCH)):
        start, length = int(MINIBATCH.prompt_lengths[row]), int(MINIBATCH.lengths[row])
        ids = MINIBATCH.input_ids[row, : start + length]
        with torch.no_grad():
            logits = policy(input_ids=ids[None]).logits[0] / 0.8
        for place in range(start, start + length):
            logprob = float(logits[place - 1, ids[place]]) - math.log(float(logits[place - 1].exp().sum()))
            assert float(found.logprobs[row, place - start]) == pytest.approx(logprob, rel=1e-4)
            total -= logprob
        num_tokens += length
    assert num_tokens == 14
    assert found.nll == pytest.approx(total / num_tokens, rel=1e-4)
    assert not found.logprobs[~MINIBATCH.response_mask].any()


@pytest.mark.parametrize("microbatch_size", [1, 3])
def test_micro_batches_leave_the_gradient_unchanged(pipeline: Any, microbatch_size: int) -> None:
    found, whole = gradient(pipeline)
    again, parts = gradient(pipeline, microbatch_size=microbatch_size)
    assert again.nll == pytest.approx(found.nll, rel=1e-5)
    torch.testing.assert_close(parts / whole.abs().max(), whole / whole.abs().max(), atol=2e-5, rtol=0)
    torch.testing.assert_close(again.logprobs, found.logprobs, atol=1e-5, rtol=1e-5)


def test_a_coefficient_weighs_the_gradient_and_not_what_is_reported(pipeline: Any) -> None:
    found, whole = gradient(pipeline)
    again, half = gradient(pipeline, coef=0.5)
    assert again.nll == found.nll
    torch.testing.assert_close(2 * half, whole)
