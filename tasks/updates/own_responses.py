"""One iteration of a stage that learns from its own responses: sample them, describe them, and take optimiser steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.resolved import ResolvedBestOfN, ResolvedDistillation
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Prompts
from vantage.tasks.rewards.scoring import score_metrics
from vantage.tasks.rollout.minibatches import OptimizerSteps
from vantage.tasks.rollout.response_shape import response_shape
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import Sampled, Scored, prompts_of_iteration, sample_and_score
from vantage.tasks.rollout.sampler_check import compare_with_sampler
from vantage.tasks.training.metric_sums import means_of
from vantage.tasks.training.optimization import update_weights
from vantage.tasks.training.seeds import derive_seed, stage_seed

Job = StageJob[ResolvedBestOfN] | StageJob[ResolvedDistillation]


@dataclass(frozen=True)
class Accumulated:
    """Measures of a minibatch whose gradient was added, before its update."""

    logprobs: Tensor
    """(B,T), in nats: the policy's log-probabilities of the sampled tokens."""
    metrics: dict[str, float]


def indices_of_iteration(job: Job, *, num_prompts: int, iteration: int) -> list[int]:
    """Return the indices of an iteration's prompts, a pure function of the seed."""
    work = job.work
    return prompts_of_iteration(
        iteration,
        num_responses=work.batch_size,
        samples_per_prompt=work.samples_per_prompt,
        num_prompts=num_prompts,
        seed=stage_seed(job),
    )


def sample_iteration(job: Job, models: RolloutModels, prompts: Prompts, iteration: int) -> Scored:
    """Return ``samples_per_prompt`` responses to each of an iteration's prompts, a pure function of the seed and the weights."""
    indices = indices_of_iteration(job, num_prompts=len(prompts), iteration=iteration)
    seed = derive_seed(stage_seed(job), "sampling", iteration)
    return sample_and_score(models, prompts, indices, count=job.work.samples_per_prompt, seed=seed)


def describe_responses(scored: Scored) -> dict[str, float]:
    """Return metrics of the responses before the update."""
    lengths, ended = scored.sampled.sequences.lengths, scored.sampled.ended
    return {
        "score_mean": scored.scores.total.mean().item(),
        "response_length_mean": lengths.float().mean().item(),
        "truncated_share": (~ended).float().mean().item(),
        **score_metrics(scored.scores),
        **response_shape(scored.sampled.sequences),
    }


def take_steps(
    policy: PolicyModel,
    optimizer: torch.optim.Optimizer,
    sampled: Sampled,
    job: Job,
    *,
    iteration: int,
    accumulate: Callable[[Sampled, list[int]], Accumulated],
    is_sampler: bool = True,
) -> dict[str, float]:
    """Take all optimiser steps of one iteration; returns the means of their metrics, and the sampler's gap before the first.

    Args:
        accumulate: adds the gradient of a minibatch; it also gets the numbers of the rows in ``sampled``.
        is_sampler: whether this policy sampled the responses. Otherwise, as for collected ones, the gap is not
            measured.

    Raises:
        SamplerDisagrees: the log-probabilities of the first minibatch differ from those of the sampler.
    """
    work = job.work
    metrics: list[dict[str, float]] = []
    gap: dict[str, float] = {}
    for step in OptimizerSteps(sampled.sequences, work, seed=stage_seed(job), iteration=iteration):
        rows = step.rows.tolist()
        minibatch = sampled.select(rows)
        found = accumulate(minibatch, rows)
        if is_sampler:
            gap = gap or compare_with_sampler(found.logprobs, minibatch, precision=work.arithmetic)
        rates = update_weights(optimizer, policy, work, step=step.number, total_steps=step.total)
        metrics.append({**found.metrics, **rates})
    return {**gap, **means_of(metrics), "learning_rate": metrics[-1]["learning_rate"]}
