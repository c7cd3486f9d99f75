"""Compute sums and networks of the stage in float64: advantages of a critic, means of steps, and a shared trunk."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tests.tasks import oracle_networks as nets
from tests.tasks import oracle_rollouts as rolls
from tests.tasks.oracle_rollouts import mean


def gae(
    rewards: Tensor,
    values: Tensor,
    gamma: float,
    lam: float,
    *,
    final: float = 0.0,
    horizon: int | None = None,
) -> Tensor:
    """Return A_t = Σ_k (γλ)^k δ_{t+k} over ``horizon`` steps at most,  δ_t = r_t + γ·V_{t+1} − V_t; ``final`` is V
    after the end.
    """
    following = [*values[1:], torch.as_tensor(final, dtype=torch.float64)]
    deltas = torch.stack([r + gamma * f - v for r, f, v in zip(rewards, following, values, strict=True)])
    if horizon is None:
        return rolls.discounted(deltas, gamma * lam)
    return torch.stack(
        [rolls.discounted(deltas[t : t + horizon], gamma * lam)[0] for t in range(len(deltas))]
    )


def means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: mean([step[name] for step in steps if name in step]) for name in names}


def summed(numbers: Sequence[Tensor]) -> Tensor:
    """Return the 0-d tensors in their order."""
    return sum(numbers[1:], start=numbers[0])


def standardised(advantages: Sequence[Tensor], over: Tensor) -> list[Tensor]:
    """Return (A − mean)/std by the population's moments of some tokens."""
    return [(x - over.mean()) / (over.std(correction=0) + 1e-8) for x in advantages]


class Joint(nn.Module):
    """A policy, and a value head on its trunk."""

    def __init__(self, policy: LlamaForCausalLM, critic: nets.Scalar) -> None:
        super().__init__()
        self.policy, self.value_head = policy, critic.head
