"""Make a thousand random rollouts with several scores, on which GDPO's advantages are compared with verl's.

They are made by Python's own generator of numbers, whose stream is the same in every version, so that a record need not
hold them.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

COUNT = 1000


@dataclass(frozen=True)
class GdpoCase:
    """One rollout of B responses with K scores each; every number has an exact float32."""

    scores: Tensor
    """(B,K) in float64."""
    weights: tuple[float, ...]
    groups: Tensor
    """(B,) the prompt of each response, in any order; each has two responses or more, since verl leaves the score of a
    single one as it is."""
    mask: Tensor
    """(B,T) True at response tokens."""
    direction: Tensor
    """(B,T) A direction on which the advantages are projected, so that one number shows every entry."""


def gdpo_case(number: int) -> GdpoCase:
    """Return the rollout of this number: graded, half-step or binary scores, groups of unequal size, responses of unequal length."""
    draw = random.Random(f"gdpo {number}")
    sizes = [draw.randint(2, 6) for _ in range(draw.randint(1, 4))]
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    draw.shuffle(groups)
    names, spread = draw.randint(1, 5), draw.choice([0.01, 1.0, 300.0])
    choices = draw.choice([(0.0, 1.0), (0.0, 0.5, 1.0), None])

    def score() -> float:
        return draw.choice(choices) if choices else draw.uniform(-spread, spread)

    rows, width = len(groups), draw.randint(1, 6)
    lengths = torch.tensor([draw.randint(1, width) for _ in groups])
    scores = torch.tensor([[score() for _ in range(names)] for _ in groups]).double()
    direction = [[draw.uniform(-1.0, 1.0) for _ in range(width)] for _ in range(rows)]
    return GdpoCase(
        scores=scores,
        weights=tuple(torch.tensor([draw.uniform(-2.0, 2.0) for _ in range(names)]).tolist()),
        groups=torch.tensor(groups),
        mask=torch.arange(width) < lengths[:, None],
        direction=torch.tensor(direction, dtype=torch.float64),
    )


def shown(advantages: Tensor, case: GdpoCase) -> tuple[float, float]:
    """Return advantages (B,T) as two numbers: along the case's direction, and the sum of their fourth powers."""
    kept = advantages.double() * case.mask
    return (kept * case.direction).sum().item(), kept.pow(4).sum().item()
