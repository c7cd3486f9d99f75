import math

import pytest
import torch

from vantage.algorithms.supervised_loss import token_nll


def test_by_hand():
    """The mean NLL equals the one worked out in the comment."""
    # Three valid tokens: (1 + 2 + 6)/3 = 3.
    leaf = torch.tensor([[-1.0, -2.0], [-6.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    result = token_nll(leaf, mask)
    assert result.loss.item() == 3
    assert (result.nll.sum.item(), result.nll.count.item()) == (9, 3)
    third = pytest.approx(-1 / 3)
    assert torch.autograd.grad(result.loss, leaf)[0].tolist() == [[third, third], [third, 0]]


def test_it_is_cross_entropy():
    """The mean NLL equals torch's cross entropy."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    tokens = torch.tensor([[1, 6, 0], [3, -100, -100]])
    mask = tokens != -100
    logprobs = torch.log_softmax(logits, -1).gather(2, tokens.clamp(min=0).unsqueeze(2)).squeeze(2)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=-100)
    assert token_nll(logprobs, mask).loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_an_empty_minibatch_is_refused_and_an_empty_micro_batch_is_0():
    logprobs, nothing = torch.full((2, 3), math.nan), torch.zeros(2, 3).bool()
    with pytest.raises(ValueError, match="response_mask has no True element"):
        token_nll(logprobs, nothing)
    assert token_nll(logprobs, nothing, denominator=5).loss.item() == 0


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (2, 2), (3,)])
def test_unequal_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        token_nll(torch.zeros(shape), torch.ones(2, 3).bool())
