"""Reward modelling: a scalar head that scores the preferred response of a pair above the other (Bradley-Terry)."""

from collections.abc import Sequence

import torch

from algorithms.preference_loss import bradley_terry, score_centring
from algorithms.supervised_loss import token_nll
from models.folders import tokenizer_digest
from models.heads import (
    ScalarModel,
    reward_with_language_head,
    save_reward,
    scores,
    scores_and_logprobs,
)
from models.output_head import OutputHead
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
CURVES = {"pair_accuracy": "train_pair_accuracy", "nll": "chosen_nll", "pair_mean": "score_mean"}
"""Metrics of the losses under the names that the ledger uses for a minibatch."""
CENTRE_ROWS = 1024
"""Demonstrations whose mean score becomes 0."""


def run(job: StageJob) -> StageResult:
    """Train a scalar head and trunk from ``init`` on the pairs of ``data``; the artifact is a reward model."""
    work = job.work
    assert isinstance(work, RewardModelling)
    device = training_device()

    # 1. The policy's trunk with a fresh head, and every pair as ids
    codec = codec_of(job, "init")
    reward, language_head = reward_with_language_head(
        job.inputs["init"], seed=derive_seed(job.seed, "init"), device=device
    )
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
            metrics, num_tokens = accumulate_preferences(
                reward, language_head, train, order.batch(step), work
            )
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
    reward: ScalarModel,
    language_head: OutputHead,
    pairs: Completions,
    indices: Sequence[int],
    work: RewardModelling,
) -> tuple[dict[str, float], int]:
    """Add the gradient of the minibatch's mean loss, micro-batch by micro-batch; returns its metrics and tokens."""
    sums, loss_sum, num_tokens = MetricSums(), 0.0, 0
    num_pairs = float(len(indices))
    num_chosen_tokens = float(sum(len(pairs.response_ids["chosen"][index]) for index in indices))
    for rows in chunks(len(indices), work.microbatch_size):
        batch = pairs.batch(indices[rows]).to(reward.head.weight.device)
        chosen_rows = slice(0, len(batch) // 2)
        with autocast(work.precision, batch.input_ids.device):
            if work.lm_coef:
                both, logprobs = scores_and_logprobs(reward, batch, language_head, rows=chosen_rows)
            else:
                both, logprobs = scores(reward, batch), None
        chosen, rejected = both.chunk(2)

        preference = bradley_terry(chosen, rejected, denominator=num_pairs)
        centring = score_centring(chosen, rejected, denominator=num_pairs)
        loss = preference.loss + work.centre_coef * centring.loss
        sums.add(preference)
        sums.add(centring)
        if logprobs is not None:
            language = token_nll(logprobs, batch.response_mask[chosen_rows], denominator=num_chosen_tokens)
            loss = loss + work.lm_coef * language.loss
            sums.add(language)
        loss.backward()
        loss_sum += loss.item()
        num_tokens += int(batch.attention_mask.sum())
    means = {CURVES.get(name, name): mean for name, mean in sums.means().items()}
    return {"loss": loss_sum, **means}, num_tokens


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
