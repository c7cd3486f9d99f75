"""Make a thousand random minibatches on which our losses are compared with those of other libraries.

They are made by Python's own generator of numbers, whose stream is the same in every version, so that a record need not
hold them.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

COUNT = 1000


@dataclass(frozen=True)
class PeerCase:
    """One minibatch; all tensors are (B,T) in float64, with arbitrary numbers outside the mask."""

    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    response_advantages: Tensor
    """One number for each response."""
    weights: Tensor
    """Weights of another sampler."""
    mask: Tensor
    direction: Tensor
    """A direction on which the gradient is projected, so that one number shows every entry."""
    clip_range_low: float
    clip_range_high: float
    temperatures: tuple[float, float]
    share: float
    """Share of the tokens that a covariance selects."""
    kl_coef: float


def peer_case(number: int) -> PeerCase:
    """Return the minibatch of this number."""
    draw = random.Random(number)
    rows, width = draw.randint(1, 4), draw.randint(1, 7)
    lengths = [draw.randint(1, width) for _ in range(rows)]
    spread = draw.choice([0.01, 0.3, 1.0])

    def numbers(low: float, high: float) -> Tensor:
        drawn = [[draw.uniform(low, high) for _ in range(width)] for _ in range(rows)]
        return torch.tensor(drawn, dtype=torch.float64)

    old_logprobs = numbers(-4.0, 0.0)
    of_rows = torch.tensor([draw.uniform(-2.0, 2.0) for _ in range(rows)], dtype=torch.float64)
    return PeerCase(
        logprobs=old_logprobs + numbers(-spread, spread),
        old_logprobs=old_logprobs,
        ref_logprobs=old_logprobs + numbers(-1.0, 1.0),
        advantages=numbers(-2.0, 2.0),
        response_advantages=of_rows[:, None].expand(rows, width).contiguous(),
        weights=numbers(0.5, 2.0),
        mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        direction=numbers(-1.0, 1.0),
        clip_range_low=draw.uniform(0.01, 0.5),
        clip_range_high=draw.uniform(0.01, 0.9),
        temperatures=(draw.uniform(0.5, 3.0), draw.uniform(0.5, 3.0)),
        share=draw.choice([0.02, 0.3, 0.7]),
        kl_coef=draw.uniform(0.1, 2.0),
    )


def entropies_of(number: int) -> list[float]:
    """Return what a controller of the entropy measures one after another, in nats per token."""
    draw = random.Random(number)
    return [draw.uniform(0.0, 0.5) for _ in range(12)]


def projected(loss: Tensor, leaf: Tensor, direction: Tensor) -> tuple[float, float]:
    """Return the loss, and its gradient with respect to ``leaf`` along a direction."""
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), (gradient * direction).sum().item()
