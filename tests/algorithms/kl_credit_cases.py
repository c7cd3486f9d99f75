"""Make a thousand random rollouts of REINFORCE++ with a baseline (arXiv 2501.03262) and a KL term in the reward.

They come from Python's own random number generator, whose stream is the same in every version, so a record need not
hold them.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

COUNT = 1000


@dataclass(frozen=True)
class KlCreditCase:
    """One rollout of B responses. The ``samples`` responses to a prompt are adjacent rows; all tensors are float64."""

    samples: int
    scores: Tensor
    """(B,)."""
    logprobs: Tensor
    """(B,T)."""
    ref_logprobs: Tensor
    """(B,T)."""
    mask: Tensor
    """(B,T) True at response tokens."""
    kl_coef: float
    direction: Tensor
    """(B,T) A direction on which the advantages are projected, so that one number shows every entry."""


def kl_credit_case(number: int) -> KlCreditCase:
    """Return the rollout of this number. The first score of each group is above the others: where the advantages hardly deviate,
    the small constants of two libraries would be compared."""
    draw = random.Random(f"kl credit {number}")
    samples, prompts, width = draw.randint(2, 5), draw.randint(1, 4), draw.randint(1, 7)
    rows = samples * prompts
    spread = draw.choice([0.5, 1.0, 20.0])
    lengths = torch.tensor([draw.randint(1, width) for _ in range(rows)])
    apart = draw.choice([0.01, 0.3, 2.0])

    def table(low: float, high: float) -> Tensor:
        return torch.tensor(
            [[draw.uniform(low, high) for _ in range(width)] for _ in range(rows)], dtype=torch.float64
        )

    logprobs = table(-4.0, -0.1)
    scores = [draw.uniform(-spread, spread) + (row % samples == 0) * 3 * spread for row in range(rows)]
    return KlCreditCase(
        samples=samples,
        scores=torch.tensor(scores, dtype=torch.float64),
        logprobs=logprobs,
        ref_logprobs=logprobs + table(-apart, apart),
        mask=torch.arange(width) < lengths[:, None],
        kl_coef=draw.choice([0.0, 0.01, 0.1, 1.0]),
        direction=table(-1.0, 1.0),
    )


def shown(advantages: Tensor, case: KlCreditCase) -> tuple[float, float]:
    """Return advantages (B,T) as two numbers: along the case's direction, and the sum of their fourth powers."""
    kept = torch.where(case.mask, advantages.double(), 0.0)
    return (kept * case.direction).sum().item(), kept.pow(4).sum().item()
