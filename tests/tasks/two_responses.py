"""Make two short responses to one prompt, and what the stage's own functions learn from them.

Response a has two tokens and b has three; lists over tokens are in the order a1, a2, b1, b2, b3.
"""

from dataclasses import dataclass
from math import log, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from vantage.algorithms.rewards import RunningMoments
from vantage.models.logprobs import LogProbs
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import UNLIMITED
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.tasks.rewards.scoring import Scores
from vantage.tasks.rollout.rollouts import (
    Rollout,
    Sampled,
    Scored,
    build_rollout,
)
from vantage.tasks.training.metric_sums import MetricSums
from vantage.tasks.updates.estimates import Estimates, estimate
from vantage.tasks.updates.policy_losses import (
    Coefficients,
    Microbatch,
    minibatch_of,
    policy_loss_of,
    value_loss_of,
)

OLD_LOGPROBS = [-1.0, -2.0, -0.5, -1.5, -1.0]
REF_LOGPROBS = [-1.2, -1.6, -0.9, -1.7, -0.8]
# k1 = log π − log π_ref: 0.2, −0.4, 0.4, 0.2, −0.2; times −0.05: −0.01, 0.02, −0.02, −0.01, 0.01
VALUES = [0.2, 0.4, 0.1, -0.2, -0.4]

# After an update: beyond both clips of 0.2 (a1 and b2 above, a2 and b1 below), a1 within a high one of 0.28
RATIOS = [1.25, 0.7, 0.75, 1.3, 0.9]
NEW_VALUES = [0.3, 0.9, 0.0, -0.3, 0.1]

# What one token weighs under each aggregation
TOKEN = [1 / 5] * 5
SEQUENCE = [1 / 2 / 2, 1 / 2 / 2, 1 / 2 / 3, 1 / 2 / 3, 1 / 2 / 3]
CONSTANT_OF_10 = [1 / (2 * 10)] * 5

_MASK = torch.tensor([[True, True, False], [True, True, True]])


def close(expected: Any) -> Any:
    """Return an approximation that allows for rounding: all is float64 but for λ of one row, which is float32."""
    return pytest.approx(expected, rel=2e-7, abs=2e-7)


def times(weights: list[float], numbers: list[float]) -> list[float]:
    """Return the products of weights and numbers, token by token."""
    return [weight * number for weight, number in zip(weights, numbers, strict=True)]


@dataclass(frozen=True)
class Update:
    """A loss, and its slope at each of the five tokens."""

    loss: float
    slopes: list[float]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Learnt:
    """What the stage makes of the two responses under one algorithm."""

    rollout: Rollout
    estimates: Estimates
    work: PolicyOptimization
    micro: Microbatch

    @property
    def scaled_scores(self) -> list[float]:
        """The scaled scores of a and b."""
        return self.rollout.scaled_scores.tolist()

    @property
    def rewards(self) -> list[float]:
        """The rewards of the five tokens. All the following are of these too."""
        return at_tokens(self.rollout.rewards)

    @property
    def advantages(self) -> list[float]:
        """The advantages that the surrogate reads, after whitening, normalising and clipping."""
        return at_tokens(self.micro.advantages)

    @property
    def targets(self) -> list[float]:
        """The critic's targets."""
        assert self.estimates.targets is not None
        return at_tokens(self.estimates.targets)

    def policy_update(self, ratios: list[float]) -> Update:
        """Return the policy's loss where π/π_old is this, and its derivative by each token's log-probability."""
        moved = [old + log(ratio) for old, ratio in zip(OLD_LOGPROBS, ratios, strict=True)]
        logprobs = over_tokens(moved).requires_grad_()
        sums = MetricSums()
        _, loss = policy_loss_of(
            LogProbs(logprobs=logprobs, entropy=torch.zeros_like(logprobs)),
            self.micro,
            self.work,
            coefs=Coefficients(self.work.algorithm.kl_penalty_coef, self.work.algorithm.entropy_coef),
            sums=sums,
        )
        return Update(loss.item(), slopes(loss, logprobs), sums.means())

    def value_update(self, values: list[float]) -> Update:
        """Return the critic's loss at these values, and its derivative by each."""
        leaf = over_tokens(values).requires_grad_()
        result = value_loss_of(leaf, self.micro, self.work)
        sums = MetricSums()
        sums.add(result)
        return Update(result.loss.item(), slopes(result.loss, leaf), sums.means())


def learn(
    preset: str,
    *,
    scores: list[float] | Scored,
    moments: RunningMoments | None = None,
    greedy_scores: list[float] | None = None,
    prompt_baseline: float | None = None,
    values: list[float] = VALUES,
    final_values: list[float] | None = None,
    critic_was_used: bool = True,
    max_length: int = 10,
    **switches: Any,
) -> Learnt:
    """Learn both responses as one rollout and one minibatch, under a preset with these overrides."""
    work = PolicyOptimization.model_validate(
        {
            "kind": "policy_optimization",
            "algorithm": {"preset": preset, **switches},
            "init": "sft",
            "critic": "value",
            "rollouts": "collected",
            "ptx": "demonstrations",
            "reward": "main",
            "prompts": "prompts",
            "batch_size": 2,
            "minibatch_size": 2,
        }
    )
    algorithm = work.algorithm
    scored = scores if isinstance(scores, Scored) else scored_as(scores)
    if moments is not None:
        moments = moments.update(scored.scores.total)
    rollout = build_rollout(
        scored,
        over_tokens(OLD_LOGPROBS),
        over_tokens(REF_LOGPROBS),
        returns=algorithm,
        moments=moments,
        kl_coef=algorithm.kl_coef,
        max_length=max_length,
    )
    estimates = estimate(
        rollout,
        algorithm,
        old_values=over_tokens(values) if algorithm.advantage == "gae" else None,
        final_values=None if final_values is None else torch.tensor(final_values, dtype=torch.float64),
        greedy_scores=None if greedy_scores is None else torch.tensor(greedy_scores, dtype=torch.float64),
        prompt_baselines=None
        if prompt_baseline is None
        else torch.full((2,), prompt_baseline, dtype=torch.float64),
        critic_was_used=critic_was_used,
    )
    [micro] = minibatch_of(rollout, estimates, torch.arange(2), work, max_length=max_length).parts(UNLIMITED)
    return Learnt(rollout=rollout, estimates=estimates, work=work, micro=micro)


def scored_as(scores: list[float], *, ended: tuple[bool, bool] = (True, True)) -> Scored:
    """Return the two responses with these scores."""
    total = torch.tensor(scores, dtype=torch.float64)
    return Scored(
        sampled=Sampled(
            prompts=["1 a+1?"] * 2,
            answers=[None, None],
            responses=["a", "b"],
            sequences=collate([[1, 5]] * 2, [[7, 2], [7, 8, 2]], pad_token_id=0),
            ended=torch.tensor(ended),
            sampler_logprobs=over_tokens(OLD_LOGPROBS),
        ),
        scores=Scores(total=total, weighted_sum=total, by_term={"main": total}),
    )


def over_tokens(five: list[float]) -> Tensor:
    """Return (2,3), with NaN on a's padding: nothing may depend on it."""
    return torch.tensor([[*five[:2], nan], five[2:]], dtype=torch.float64)


def at_tokens(per_token: Tensor) -> list[float]:
    """Return the five numbers of a (2,3) tensor."""
    return per_token[_MASK].tolist()


def slopes(loss: Tensor, leaf: Tensor) -> list[float]:
    """Return d loss / d leaf at the five tokens; at the padding it must be 0."""
    [gradient] = torch.autograd.grad(loss, leaf)
    assert gradient[~_MASK].tolist() == [0.0]
    return at_tokens(gradient)
