"""Reward modelling: a scalar head that scores the preferred response of a pair above the other (Bradley-Terry)."""

from collections.abc import Sequence

import torch

from algorithms.preference_loss import bradley_terry
from models.folders import tokenizer_digest
from models.heads import ScalarModel, reward_from_policy, save_reward, scores
from schemas.job import StageJob, StageResult
from schemas.recipe import RewardModelling
from tasks.attempt import Attempt
from tasks.data_order import DataOrder
from tasks.examples import Completions, codec_of, read_completions
from tasks.metric_sums import MetricSums
from tasks.optimization import autocast, chunks, make_optimizer, training_device, update_weights
from tasks.seeds import derive_seed
from tasks.splits import TEST, TRAIN, VALIDATION

SIDES = ("chosen", "rejected")
CENTRE_ROWS = 1024
"""Demonstrations whose mean score becomes 0."""


def run(job: StageJob) -> StageResult:
    """Train a scalar head and trunk from ``init`` on the pairs of ``data``; the artifact is a reward model."""
    work = job.work
    assert isinstance(work, RewardModelling)
    device = training_device()

    # 1. The policy's trunk with a fresh head, and every pair as ids
    codec = codec_of(job, "init")
    reward = reward_from_policy(job.inputs["init"], seed=derive_seed(job.seed, "init")).to(device)
    train, validation, test = (
        read_completions(job.inputs["data"], split, SIDES, codec) for split in (TRAIN, VALIDATION, TEST)
    )
    optimizer = make_optimizer(reward, weight_decay=work.weight_decay)
    order = DataOrder(
        num_examples=len(train),
        batch_size=work.batch_size,
        seed=job.seed,
        lengths=train.lengths() if work.group_by_length else None,
    )
    num_steps = order.num_batches(work.epochs)

    # 2. Optimiser steps, from wherever an earlier attempt got to
    with Attempt(
        job, total=num_steps, modules={"reward": reward}, optimizers={"reward": optimizer}
    ) as attempt:
        for step in attempt.remaining():
            metrics, num_tokens = accumulate_preferences(reward, train, order.batch(step), work)
            metrics |= update_weights(optimizer, reward, work, step=step, total_steps=num_steps)
            attempt.finish_step(metrics, num_tokens=num_tokens, headline="loss")

    # 3. How well it ranks pairs that it has not seen
    held_out = measure_pairs(reward, test, batch_size=work.batch_size)
    selected = measure_pairs(reward, validation, batch_size=work.batch_size)
    measured = {**held_out, **{f"validation_{name}": value for name, value in selected.items()}}

    # 4. Scores have no natural zero: put it at the mean demonstration
    score_shift = 0.0
    if work.centre_on is not None:
        demonstrations = read_completions(job.inputs["centre_on"], TRAIN, ["response"], codec)
        score_shift = mean_score(reward, demonstrations, batch_size=2 * work.batch_size)

    save_reward(reward, codec.tokenizer, job.output, score_shift=score_shift)
    return StageResult(
        metrics={**measured, "score_shift": score_shift, "prompts_too_long": train.num_too_long},
        tokenizer_digest=tokenizer_digest(job.output),
    )


def accumulate_preferences(
    reward: ScalarModel, pairs: Completions, indices: Sequence[int], work: RewardModelling
) -> tuple[dict[str, float], int]:
    """Add the gradient of the minibatch's mean loss, micro-batch by micro-batch; returns its metrics and tokens."""
    sums, loss_sum, num_tokens = MetricSums(), 0.0, 0
    for rows in chunks(len(indices), work.microbatch_size):
        batch = pairs.batch(indices[rows]).to(reward.head.weight.device)
        with autocast(work.precision, batch.input_ids.device):
            chosen, rejected = scores(reward, batch).chunk(2)
        result = bradley_terry(chosen, rejected, denominator=float(len(indices)))
        result.loss.backward()
        sums.add(result)
        loss_sum += result.loss.item()
        num_tokens += int(batch.attention_mask.sum())
    means = sums.means()
    metrics = {
        "loss": loss_sum,
        "train_pair_accuracy": means["pair_accuracy"],
        "score_gap": means["score_gap"],
    }
    return metrics, num_tokens


@torch.no_grad()
def measure_pairs(reward: ScalarModel, pairs: Completions, *, batch_size: int) -> dict[str, float]:
    """Accuracy, Bradley-Terry loss (nats) and mean score gap over held-out pairs."""
    sums, loss_sum = MetricSums(), 0.0
    for rows in chunks(len(pairs), batch_size):
        batch = pairs.batch(range(len(pairs))[rows]).to(reward.head.weight.device)
        chosen, rejected = scores(reward, batch).chunk(2)
        result = bradley_terry(chosen, rejected, denominator=float(len(pairs)))
        sums.add(result)
        loss_sum += result.loss.item()
    means = sums.means()
    return {
        "pair_accuracy": means["pair_accuracy"],
        "score_gap": means["score_gap"],
        "preference_loss": loss_sum,
    }


@torch.no_grad()
def mean_score(reward: ScalarModel, examples: Completions, *, batch_size: int) -> float:
    """Mean score of the first demonstrations, in the reward model's own unit."""
    count = min(len(examples), CENTRE_ROWS)
    total = 0.0
    for rows in chunks(count, batch_size):
        batch = examples.batch(range(count)[rows]).to(reward.head.weight.device)
        total += float(scores(reward, batch).double().sum())
    return total / count
