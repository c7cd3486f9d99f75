import math

import pytest
import torch
from torch import Tensor

from models.full_kl import token_full_kl
from models.output_head import OutputHead


def head_of_logits(vocabulary: int) -> OutputHead:
    """Hidden states are the logits themselves."""
    return OutputHead(torch.eye(vocabulary, dtype=torch.float64), None, scale=1.0, softcap=None)


def random_head(seed: int, hidden_size: int, *, softcap: float | None) -> OutputHead:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, hidden_size, dtype=torch.float64, generator=generator)
    bias = torch.randn(7, dtype=torch.float64, generator=generator)
    return OutputHead(weight, bias, scale=1.3, softcap=softcap)


def test_a_hand_worked_divergence() -> None:
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): Σ p·log(p/q) = ½·log 2 + ¼·log ½ + ¼·0 = ¼·log 2
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).double(), torch.tensor([[0.25, 0.5, 0.25]]).double()
    hidden = p.log().requires_grad_()
    kl = token_full_kl(hidden, head_of_logits(3), q.log(), head_of_logits(3), temperature=1.0)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([math.log(2) / 4])
    # p_v·(log p_v/q_v − KL), with log p/q = (1, −1, 0)·log 2
    expected = torch.tensor([[0.5 * (1 - 0.25), 0.25 * (-1 - 0.25), 0.25 * -0.25]]).double() * math.log(2)
    torch.testing.assert_close(hidden.grad, expected)


def test_temperature_flattens_both_distributions() -> None:
    # at temperature 2, logits 2·log(3) and 0 give p = (3/4, 1/4), against a uniform q:
    # ¾·log(3/2) + ¼·log(1/2)
    hidden = torch.tensor([[2 * math.log(3), 0.0]]).double()
    kl = token_full_kl(
        hidden, head_of_logits(2), torch.zeros_like(hidden), head_of_logits(2), temperature=2.0
    )
    assert kl.tolist() == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)])


@pytest.mark.parametrize("chunk_tokens", [1, 2, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_hand_written_gradient_is_the_numerical_one(softcap: float | None, chunk_tokens: int) -> None:
    torch.manual_seed(0)
    # the reference is a model of another width and without a cap
    ref_hidden, ref_head = torch.randn(5, 4, dtype=torch.float64), random_head(2, 4, softcap=None)
    head = random_head(1, 3, softcap=softcap)
    parts = [torch.randn(5, 3, dtype=torch.float64), head.weight, head.bias]

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        policy_head = OutputHead(weight, bias, head.scale, softcap)
        return token_full_kl(
            hidden, policy_head, ref_hidden, ref_head, temperature=0.8, chunk_tokens=chunk_tokens
        )

    assert torch.autograd.gradcheck(function, [part.requires_grad_() for part in parts if part is not None])


def test_a_distribution_has_no_divergence_from_itself_and_nothing_pulls() -> None:
    torch.manual_seed(0)
    head = random_head(1, 3, softcap=1.5)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    kl = token_full_kl(hidden, head, hidden.detach(), head, temperature=0.8, chunk_tokens=2)
    kl.sum().backward()
    assert hidden.grad is not None
    assert kl.tolist() == [0.0] * 5
    assert not hidden.grad.any()


def test_nothing_flows_to_the_reference() -> None:
    torch.manual_seed(0)
    hidden, ref_hidden = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    head, ref_head = random_head(1, 3, softcap=None), random_head(2, 3, softcap=None)
    assert ref_head.bias is not None
    ref_head.weight.requires_grad_()
    ref_head.bias.requires_grad_()
    token_full_kl(hidden, head, ref_hidden, ref_head, temperature=1.0).sum().backward()
    assert hidden.grad is not None and hidden.grad.any()
    assert ref_hidden.grad is None and ref_head.weight.grad is None and ref_head.bias.grad is None
    assert not token_full_kl(hidden.detach(), head, ref_hidden, ref_head, temperature=1.0).requires_grad


def test_tokens_that_the_policy_never_takes_count_nothing() -> None:
    # in float32 e^−300 is 0; its log-ratio of −300 must neither count nor make a NaN
    head = OutputHead(torch.eye(3), None, scale=1.0, softcap=None)
    hidden = torch.tensor([[0.0, 0.0, -300.0]], requires_grad=True)
    kl = token_full_kl(hidden, head, torch.zeros(1, 3), head, temperature=1.0)
    kl.sum().backward()
    # ½·log(3/2) twice
    torch.testing.assert_close(kl, torch.tensor([math.log(1.5)]))
    torch.testing.assert_close(hidden.grad, torch.zeros(1, 3), rtol=0, atol=1e-6)
