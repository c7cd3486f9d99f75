"""Reward modelling: a scalar head that scores the preferred response of a pair above the other (Bradley-Terry)."""


import torch

from algorithms.preference_loss import bradley_terry
from models.folders import load_tokenizer, tokenizer_digest
from models.heads import ScalarModel, reward_from_policy, save_reward, scores
from schemas.job import StageJob, StageResult
from schemas.recipe import RewardModelling
from tasks.attempt import Attempt
from tasks.data_order import batch_indices, num_batches, short_first
from tasks.examples import Completions, encode_completions
from tasks.metric_sums import MetricSums
from tasks.optimization import autocast, chunks, learning_rate_at, make_optimizer, take_step, training_device
from tasks.rows import read_rows
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
    tokenizer = load_tokenizer(job.inputs["init"])
    reward = reward_from_policy(job.inputs["init"], seed=derive_seed(job.seed, "init")).to(device)
    pad = tokenizer.pad_token_id

    def encoded(role: str, split: str, *columns: str) -> Completions:
        rows = read_rows(job.inputs[role], split)
        return encode_completions(rows, tokenizer, columns=columns, generation=job.generation, chat=job.chat)

    train = encoded("data", TRAIN, *SIDES)
    first_epoch = short_first(train.lengths(), job.seed) if work.order == "short_first" else None
    optimizer = make_optimizer(reward, weight_decay=work.weight_decay)
    num_steps = num_batches(epochs=work.epochs, num_examples=len(train), batch_size=work.batch_size)

    # 2. Optimiser steps, from wherever an earlier attempt got to
    with Attempt(job, total=num_steps, modules={"reward": reward}, optimizers={"reward": optimizer}) as attempt:
        for step in attempt.remaining():
            indices = batch_indices(
                step,
                batch_size=work.batch_size,
                num_examples=len(train),
                seed=job.seed,
                first_epoch=first_epoch,
            )
            metrics, num_tokens = accumulate_preferences(reward, train, indices, work, pad_token_id=pad)
            learning_rate = learning_rate_at(
                step,
                peak=work.learning_rate,
                warmup_steps=work.warmup_steps,
                total_steps=num_steps,
                schedule=work.schedule,
            )
            grad_norm = take_step(optimizer, reward, learning_rate=learning_rate, max_grad_norm=work.max_grad_norm)
            attempt.finish_step(
                {**metrics, "grad_norm": grad_norm, "learning_rate": learning_rate},
                num_tokens=num_tokens,
                headline="loss",
            )

    # 3. How well it ranks pairs that it has not seen
    measured: dict[str, float | None] = {}
    for prefix, split in (("validation_", VALIDATION), ("", TEST)):
        pairs = encoded("data", split, *SIDES)
        held_out = measure_pairs(reward, pairs, pad_token_id=pad, batch_size=work.batch_size)
        measured |= {f"{prefix}{name}": value for name, value in held_out.items()}

    # 4. Scores have no natural zero: put it at the mean demonstration
    score_shift = 0.0
    if work.centre_on is not None:
        demonstrations = encoded("centre_on", TRAIN, "response")
        score_shift = mean_score(reward, demonstrations, pad_token_id=pad, batch_size=2 * work.batch_size)

    save_reward(reward, tokenizer, job.output, score_shift=score_shift)
    return StageResult(
        metrics={**measured, "score_shift": score_shift}, tokenizer_digest=tokenizer_digest(job.output)
    )


def accumulate_preferences(
    reward: ScalarModel, pairs: Completions, indices: Sequence[int], work: RewardModelling, *, pad_token_id: int
) -> tuple[dict[str, float], int]:
    """Add the gradient of the minibatch's mean loss; returns its metrics and the number of tokens read."""
    sums, loss_sum, num_tokens = MetricSums(), 0.0, 0
    for rows in chunks(len(indices), work.microbatch_size):
        batch = pairs.stacked(SIDES, indices[rows], pad_token_id=pad_token_id).to(reward.device)
        with autocast(work.precision, reward.device):
            chosen, rejected = scores(reward, batch).chunk(2)
        result = bradley_terry(chosen, rejected, denominator=float(len(indices)))
        result.loss.backward()
        sums.add(result)
        loss_sum += result.loss.item()
        num_tokens += int(batch.attention_mask.sum())
    means = sums.means()
    metrics = {"loss": loss_sum, "train_pair_accuracy": means["pair_accuracy"], "score_gap": means["score_gap"]}
    return metrics, num_tokens


@torch.no_grad()
def measure_pairs(
    reward: ScalarModel, pairs: Completions, *, pad_token_id: int, batch_size: int
) -> dict[str, float]:
    """Accuracy, loss and mean score gap over held-out pairs."""
    sums, loss_sum = MetricSums(), 0.0
    for rows in chunks(len(pairs), batch_size):
        indices = range(len(pairs))[rows]
        chosen, rejected = scores(
            reward, pairs.stacked(SIDES, indices, pad_token_id=pad_token_id).to(reward.device)
        ).chunk(2)
        result = bradley_terry(chosen, rejected, denominator=float(len(pairs)))
        sums.add(result)
        loss_sum += result.loss.item()
    means = sums.means()
    return {"pair_accuracy": means["pair_accuracy"], "score_gap": means["score_gap"], "loss": loss_sum}


@torch.no_grad()
def mean_score(reward: ScalarModel, examples: Completions, *, pad_token_id: int, batch_size: int) -> float:
    """Mean score of the first demonstrations, in the reward model's own unit."""
    count = min(len(examples), CENTRE_ROWS)
    total = 0.0
    for rows in chunks(count, batch_size):
        batch = examples.batch("response", range(count)[rows], pad_token_id=pad_token_id).to(reward.device)
        total += float(scores(reward, batch).double().sum())
    return total / count
