"""The critic's regression on returns: all optimiser steps of one rollout."""

from torch import Tensor
from torch.optim import Optimizer

from vantage.models.heads import ScalarModel
from vantage.schemas.recipe.resolved import ResolvedValuePretraining
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.minibatches import OptimizerSteps
from vantage.tasks.rollout.returns import Returned
from vantage.tasks.rollout.rollouts import Rollout
from vantage.tasks.training.gradients import backward
from vantage.tasks.training.metric_sums import LossSums, MetricSums
from vantage.tasks.training.optimization import autocast, update_weights
from vantage.tasks.training.passes import passes_of
from vantage.tasks.training.seeds import stage_seed
from vantage.tasks.updates.critic_losses import critic_loss, predictions, shards_of


def regress(
    critic: ScalarModel,
    optimizer: Optimizer,
    learned: Returned,
    job: StageJob[ResolvedValuePretraining],
    *,
    iteration: int,
) -> dict[str, float]:
    """Take all optimiser steps of one rollout, and return the metrics of the last one."""
    work, rollout = job.work, learned.rollout
    metrics: dict[str, float] = {}
    for step in OptimizerSteps(rollout.sequences, work, seed=stage_seed(job), iteration=iteration):
        metrics = accumulate_value_loss(critic, rollout, learned.returns, step.rows, work)
        metrics |= update_weights(optimizer, critic, work, step=step.number, total_steps=step.total)
    return metrics


def accumulate_value_loss(
    critic: ScalarModel, rollout: Rollout, returns: Tensor, rows: Tensor, work: ResolvedValuePretraining
) -> dict[str, float]:
    """Add the gradient of one minibatch's value loss, micro-batch by micro-batch; returns its metrics."""
    sums, losses = MetricSums(), LossSums()
    minibatch, of_minibatch = rollout.sequences.select(rows), returns[rows]
    denominator = sum(minibatch.known.responses)
    shards = None
    if work.critic_head.ensemble is not None:  # reading the rows makes the CPU wait for the GPU
        prompts = [rollout.sampled.prompts[row] for row in rows.tolist()]
        shards = shards_of(prompts, work.critic_head, returns.device)
    for part in passes_of(minibatch, work.pass_limits):
        micro = part.select(minibatch)
        targets = of_minibatch[part.rows, : micro.response_ids.shape[1]]
        with autocast(work.arithmetic, targets.device):
            predicted = predictions(critic, micro, work.critic_head)
        result = critic_loss(
            predicted,
            None,
            targets,
            micro.response_mask,
            head=work.critic_head,
            shards=None if shards is None else shards[part.rows],
            value_clip_range=None,
            denominator=denominator,
        )
        backward(part.weight * result.loss, critic, is_last=part.is_last)
        sums.add(result, part.weight)
        losses.add("value_loss", result.loss, part.weight)
    return {**losses.totals(), "value_bias": sums.means()["value_bias"]}
