"""Compute critics of quantiles and ensembles in float64 and token by token, for the oracles of whole stages."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.tasks import oracle_networks as nets
from tests.tasks.oracle_rollouts import decode
from vantage.schemas.recipe.critic_head import CriticHead


def with_head(critic: nets.Scalar, head: CriticHead, seed: int) -> nets.Scalar:
    """Return the same critic with a head of N rows, whose mean is the row that it had."""
    count = head.quantiles or head.ensemble
    if count is None:
        return critic
    weight = critic.head.weight.detach().repeat(count, 1)
    if head.ensemble is not None:
        hidden = weight.shape[1]
        draw = torch.Generator().manual_seed(seed ^ 1)
        noise = torch.empty(count, hidden).normal_(0.0, nets.FRESH_HEAD_STD / hidden**0.5, generator=draw)
        weight = weight + noise - noise.mean(0)
    return nets.Scalar(critic.backbone, weight, critic.head.bias.detach().repeat(count))


def outputs(
    critic: nets.Scalar, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return (length, N) of each response."""
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    read = critic.head(nets.hidden_states(critic.backbone, rows))
    return [
        row[len(prompt) - 1 : len(prompt) - 1 + len(response)]
        for row, prompt, response in zip(read, prompts, responses, strict=True)
    ]


def loss(
    critic: nets.Scalar,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    targets: Sequence[Tensor],
    head: CriticHead,
) -> Tensor:
    """Return the mean over the tokens of one minibatch."""
    found: list[Tensor] = []
    for prompt, output, of_response in zip(
        prompts, outputs(critic, prompts, responses), targets, strict=True
    ):
        for row, target in zip(output, of_response, strict=True):
            if head.quantiles is not None:
                found.append(_pinball(row, target, head.huber))
            else:
                assert head.ensemble is not None
                found.append((row[shard(prompt, head.ensemble)] - target) ** 2 / 2)
    return torch.stack(found).mean()


def _pinball(quantiles: Tensor, target: Tensor, kappa: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for number, quantile in enumerate(quantiles):
        tau = (2 * number + 1) / (2 * len(quantiles))
        u = target - quantile
        side = tau if u >= 0 else 1 - tau
        if kappa == 0:
            total = total + side * u.abs()
        elif u.abs() <= kappa:
            total = total + side * u**2 / 2 / kappa
        else:
            total = total + side * (u.abs() - kappa / 2)
    return total / len(quantiles)


def shard(prompt: Sequence[int], count: int) -> int:
    """Return the head that learns from a prompt; its first id is no text."""
    digest = hashlib.sha256(f"critic:{decode(prompt[1:])}".encode()).hexdigest()
    return int(digest[:16], 16) % count


def kept_where_heads_differ(spread: Sequence[Tensor], share: float) -> list[Tensor]:
    """Return 0 for the tokens with the least spread, which are at most ``share`` of all, and 1 for the others."""
    everything = sorted(value for each in spread for value in each.tolist())
    bound = everything[int(share * len(everything))]
    return [torch.tensor([float(value >= bound) for value in each.tolist()]) for each in spread]
