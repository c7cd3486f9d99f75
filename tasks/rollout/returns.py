"""Monte-Carlo returns of a fixed policy's responses, on which a critic is trained and measured."""

from dataclasses import dataclass, field

from torch import Tensor

from vantage.algorithms.advantages import monte_carlo_returns
from vantage.algorithms.rewards import RunningMoments
from vantage.tasks.rewards.scoring import score_metrics
from vantage.tasks.rollout.response_source import ResponseSource
from vantage.tasks.rollout.rollouts import Rollout, shape
from vantage.tasks.rollout.sampler_check import compare_with_sampler
from vantage.tasks.training import progress


@dataclass(frozen=True)
class Returned:
    """Responses with their Monte-Carlo returns."""

    rollout: Rollout
    returns: Tensor
    """(B,T)."""
    gap: dict[str, float] = field(default_factory=dict)
    """Difference between the policy's and the sampler's log-probabilities; empty: not measured."""

    def means(self) -> dict[str, float]:
        """Return the mean score over responses, the means and percentiles of the reward's parts, and the mean return
        over tokens."""
        mask = self.rollout.sequences.response_mask
        return {
            "score_mean": self.rollout.scores.total.mean().item(),
            **score_metrics(self.rollout.scores),
            "return_mean": self.returns[mask].mean().item(),
        }


def score_moments(source: ResponseSource) -> RunningMoments:
    """Return the moments of the scores of one rollout, by which all returns here are scaled, and which the policy stage takes over.

    The moments stay fixed for the whole stage: a target that moved with them would not be the return of one policy.
    """
    if source.job.work.returns.reward_scaling == "none":
        return RunningMoments()
    return RunningMoments().update(source.for_moments().scores.total)


def training_rollout(source: ResponseSource, moments: RunningMoments, iteration: int) -> Returned:
    """Return the rollout of one iteration.

    If all responses were collected, the sampler's log-probabilities are taken as the policy's: the held-out responses
    of the same collection have shown that they agree.

    Raises:
        SamplerDisagrees: the policy's log-probabilities are not those that it sampled with.
    """
    work = source.job.work
    scored = source.for_iteration(iteration)
    rollout = shape(
        source.models,
        scored,
        returns=work.returns,
        moments=moments,
        by_sampler=not work.fresh_responses,
    )
    gap = {}
    if work.fresh_responses:
        gap = compare_with_sampler(rollout.logprobs, rollout.sampled, precision=work.arithmetic)
    return Returned(rollout, _returns(rollout, gamma=work.returns.gamma), gap)


def measured_responses(source: ResponseSource, moments: RunningMoments, split: str) -> Returned:
    """Return the responses to the prompts of a held-out split.

    Raises:
        SamplerDisagrees: the policy's log-probabilities are not those that it sampled with.
    """
    work = source.job.work
    with progress.within(split):
        rollout = shape(source.models, source.held_out(split), returns=work.returns, moments=moments)
    compare_with_sampler(rollout.logprobs, rollout.sampled, precision=work.arithmetic)
    return Returned(rollout, _returns(rollout, gamma=work.returns.gamma))


def _returns(rollout: Rollout, *, gamma: float) -> Tensor:
    return monte_carlo_returns(rollout.rewards, rollout.sequences.response_mask, gamma=gamma)
