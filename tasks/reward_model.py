"""Reward modelling: a scalar head that scores preferred responses above the others (Bradley-Terry).

The model learns from pairs, or from rankings of several responses to each prompt. Each of the two has a function that
adds a minibatch's gradient and one that measures held-out rows; all else is the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from vantage.algorithms.preference_loss import (
    bradley_terry,
    rankable,
    ranking_loss,
    score_centring,
    untied_pairs,
)
from vantage.algorithms.preference_loss import measure_pairs as measure
from vantage.algorithms.supervised_loss import token_nll
from vantage.algorithms.uncertainty import Estimate, clustered_mean, clustered_ratio
from vantage.models.adapters import has_adapters
from vantage.models.folders import tokenizer_digest
from vantage.models.heads import (
    ScalarModel,
    reward_with_language_head,
    save_reward,
    scores,
    scores_and_logprobs,
)
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.resolved import ResolvedRewardModelling
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import comparison_metrics
from vantage.tasks.data.examples import (
    Codec,
    Completions,
    Rankings,
    codec_of,
    read_completions,
    read_rankings,
)
from vantage.tasks.data.splits import TEST, TRAIN, VALIDATION
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.data_order import order_of
from vantage.tasks.training.found_limits import Taken, found_limits, longest_row, within_memory
from vantage.tasks.training.gradients import backward
from vantage.tasks.training.measured import uncertainty_of, values_of
from vantage.tasks.training.metric_sums import LossSums, MetricSums
from vantage.tasks.training.networks import trained
from vantage.tasks.training.optimization import (
    autocast,
    optimizer_of,
    training_device,
    update_weights,
)
from vantage.tasks.training.passes import laid_out, passes
from vantage.tasks.training.seeds import derive_seed, stage_seed
from vantage.tasks.training.stage_state import NoState

SIDES = ("chosen", "rejected")
CURVES = {"pair_accuracy": "train_pair_accuracy", "nll": "chosen_nll", "pair_mean": "score_mean"}
"""Metrics of the losses under the names that the ledger uses for a minibatch."""
CENTRE_ROWS = 1024
"""Number of demonstrations whose mean score becomes 0."""


def run(job: StageJob[ResolvedRewardModelling]) -> StageResult:
    """Train a scalar head and trunk from ``init`` on ``data`` or ``rankings``; the artifact is a reward model."""
    work = job.work
    device = training_device()

    # 1. The policy's trunk with a fresh head, and every pair or ranking as ids
    codec = codec_of(job, "init")
    seed = derive_seed(stage_seed(job), "init")
    reward = trained(
        job,
        lambda training: reward_with_language_head(
            job.model("init"), seed=seed, device=device, training=training
        ),
        job.model("init"),
        device,
    )
    train, validation, test = (read_preferences(job, split, codec) for split in (TRAIN, VALIDATION, TEST))
    encoding = comparison_metrics(
        job, "rankings" if "rankings" in job.inputs else "data", [train, validation, test]
    )
    optimizer = optimizer_of(reward, work)
    order = order_of(train, work, stage_seed(job))
    num_steps = order.num_batches(work.epochs)
    taken = Taken(
        longest_row(train, shares_prompt=work.pass_limits.share_prompts),
        [partial(scored, reward, with_language=work.lm_coef > 0)],
        work.arithmetic,
        [optimizer],
    )
    work = within_memory(job, found_limits(job, taken, device=device)).work

    # 2. Take optimiser steps, from the last step of an earlier attempt on
    with Attempt(
        job, total=num_steps, modules={"reward": reward}, optimizers={"reward": optimizer}, state=NoState()
    ) as attempt:
        for step in attempt.remaining():
            metrics, num_tokens = accumulate_preferences(reward, train, order.batch(step), work)
            metrics |= update_weights(optimizer, reward, work, step=step, total_steps=num_steps)
            attempt.finish_step(metrics, num_tokens=num_tokens, headline="loss")

    # 3. Measure how well the model ranks responses that it has not seen
    at_once = work.pass_limits.or_rows(work.batch_size)
    held_out = measure_preferences(reward, test, limits=at_once)
    selected = measure_preferences(reward, validation, limits=at_once)
    measured = {**held_out, **{f"validation_{name}": value for name, value in selected.items()}}

    # 4. Scores have no natural zero: put zero at the mean score of demonstrations
    score_shift = 0.0
    if work.centre_on is not None:
        demonstrations = read_completions(
            job.inputs["centre_on"], TRAIN, ["response"], codec, enough=CENTRE_ROWS
        )
        score_shift = mean_score(
            reward, demonstrations, limits=replace(at_once, rows=2 * (at_once.rows or work.batch_size))
        )

    base = job.base_digest("init") if has_adapters(reward) else None
    save_reward(reward, codec.tokenizer, job.output, score_shift=score_shift, base=base)
    return StageResult(
        metrics={**values_of(measured), "score_shift": score_shift, **encoding},
        uncertainty=uncertainty_of(measured),
        tokenizer_digest=tokenizer_digest(job.output),
        base=base,
    )


def read_preferences(
    job: StageJob[ResolvedRewardModelling], split: str, codec: Codec
) -> Completions | Rankings:
    """Return the pairs of ``data`` or the rankings of ``rankings``; for training, only those of ``half``."""
    half = job.work.half if split == TRAIN else None
    if "rankings" in job.inputs:
        return read_rankings(job.inputs["rankings"], split, codec, half=half)
    return read_completions(job.inputs["data"], split, SIDES, codec, half=half)


def scored(reward: ScalarModel, batch: Sequences, *, with_language: bool) -> Tensor:
    """Compute a pass: scores of responses and, with ``with_language``, log-probabilities of the first half too."""
    if not with_language:
        return scores(reward, batch)
    found, logprobs = scores_and_logprobs(reward, batch, first_rows=(len(batch) + 1) // 2)
    return found.sum() + logprobs.sum()


def accumulate_preferences(
    reward: ScalarModel,
    preferences: Completions | Rankings,
    indices: Sequence[int],
    work: ResolvedRewardModelling,
) -> tuple[dict[str, float], int]:
    """Add the gradient of the minibatch's mean loss, micro-batch by micro-batch; returns its metrics and tokens."""
    if isinstance(preferences, Rankings):
        return accumulate_rankings(reward, preferences, indices, work)
    return accumulate_pairs(reward, preferences, indices, work)


def measure_preferences(
    reward: ScalarModel, preferences: Completions | Rankings, *, limits: PassLimits
) -> dict[str, Estimate]:
    """Measure ``pair_accuracy``, ``score_gap`` and ``preference_loss`` over held-out pairs or rankings."""
    if isinstance(preferences, Rankings):
        return measure_rankings(reward, preferences, limits=limits)
    return measure_pairs(reward, preferences, limits=limits)


def accumulate_pairs(
    reward: ScalarModel,
    pairs: Completions,
    indices: Sequence[int],
    work: ResolvedRewardModelling,
) -> tuple[dict[str, float], int]:
    """Add the gradient of Σ −log σ(chosen − rejected − margin)/pairs, with centring and the chosen responses' NLL.

    Each pair has its own margin, if the data has margins. A micro-batch counts pairs.
    """
    sums, losses, num_tokens = MetricSums(), LossSums(), 0
    num_pairs = float(len(indices))
    chosen_lengths = (len(pairs.response_ids["chosen"][index]) for index in indices)
    num_chosen_tokens = float(sum(chosen_lengths))
    for part in passes(pairs.lengths(indices), work.pass_limits, sequences=len(SIDES), is_divided=True):
        rows = [indices[row] for row in part.rows]
        batch = laid_out(pairs.batch(rows).to(reward.device), work.pass_limits)
        chosen_rows = slice(0, len(batch) // 2)
        with autocast(work.arithmetic, batch.input_ids.device):
            if work.lm_coef:
                both, logprobs = scores_and_logprobs(reward, batch, first_rows=len(rows))
            else:
                both, logprobs = scores(reward, batch), None
        chosen, rejected = both.chunk(2)

        margin = _margin(pairs, rows, chosen)
        preference = bradley_terry(chosen, rejected, margin=margin, denominator=num_pairs)
        centring = score_centring(chosen, rejected, denominator=num_pairs)
        loss = preference.loss + work.centre_coef * centring.loss
        sums.add(preference, part.weight)
        sums.add(centring, part.weight)
        if logprobs is not None:
            language = token_nll(logprobs, batch.response_mask[chosen_rows], denominator=num_chosen_tokens)
            loss = loss + work.lm_coef * language.loss
            sums.add(language, part.weight)
        backward(part.weight * loss, reward, is_last=part.is_last)
        losses.add("loss", loss, part.weight)
        num_tokens += int(part.weight) * sum(batch.known.totals)
    means = {CURVES.get(name, name): mean for name, mean in sums.means().items()}
    return {**losses.totals(), **means}, ranks.total(num_tokens)


def _margin(pairs: Completions, indices: Sequence[int], like: Tensor) -> Tensor | None:
    return None if pairs.margins is None else like.new_tensor([pairs.margins[index] for index in indices])


def accumulate_rankings(
    reward: ScalarModel, rankings: Rankings, indices: Sequence[int], work: ResolvedRewardModelling
) -> tuple[dict[str, float], int]:
    """Add the gradient of the mean over prompts of each one's mean −log σ(better − worse) over its untied pairs.

    Every completion goes through the model once. A micro-batch counts prompts, and holds all completions of each.
    """
    sums, losses, num_tokens, num_completions = MetricSums(), LossSums(), 0, 0
    num_prompts = float(rankable(*rankings.ranks_of(indices)))
    sizes = rankings.sizes(indices)
    for part in passes(rankings.lengths(indices), work.pass_limits, sequences=sizes, is_divided=True):
        batch = rankings.batch([indices[row] for row in part.rows]).to(reward.device)
        with autocast(work.arithmetic, batch.ranks.device):
            completion_scores = scores(reward, laid_out(batch.sequences, work.pass_limits))
        preference = ranking_loss(completion_scores, batch.ranks, batch.group_ids, denominator=num_prompts)
        sums.add(preference, part.weight)
        backward(part.weight * preference.loss, reward, is_last=part.is_last)
        losses.add("loss", preference.loss, part.weight)
        losses.add("scores", completion_scores.sum(), part.weight)
        num_completions += int(part.weight) * len(batch.sequences)
        num_tokens += int(part.weight) * sum(batch.sequences.known.totals)
    means = {CURVES.get(name, name): mean for name, mean in sums.means().items()}
    totals = losses.totals()
    score_mean = totals["scores"] / ranks.total(num_completions)
    return {"loss": totals["loss"], **means, "score_mean": score_mean}, ranks.total(num_tokens)


@torch.no_grad()
def measure_rankings(reward: ScalarModel, rankings: Rankings, *, limits: PassLimits) -> dict[str, Estimate]:
    """Return accuracy, Bradley-Terry loss (nats) and mean score gap over all untied pairs of held-out rankings.

    Accuracy and gap count every pair once, so a prompt with many responses has more weight. The loss is weighted as in
    training: a mean over prompts of each one's mean over its pairs. All pairs of a prompt are one cluster.
    """
    of_prompts = ranking_scores(reward, rankings, limits=limits)
    prompts, of_pairs = rankings.clusters(), []
    for prompt, places in enumerate(rankings.ranks):
        better, worse, _ = untied_pairs(torch.tensor(places), torch.zeros(len(places), dtype=torch.int64))
        pairs = measure(of_prompts[prompt, better], of_prompts[prompt, worse])
        weights = torch.full((len(better),), 1 / len(better), dtype=torch.float64)
        clusters = prompts[prompt].expand(len(better))
        of_pairs.append((pairs.correct, pairs.score_gap, pairs.loss, weights, clusters))
    correct, gaps, losses, weights, clusters = (torch.cat(each) for each in zip(*of_pairs, strict=True))
    return {
        "pair_accuracy": clustered_mean(correct, clusters),
        "score_gap": clustered_mean(gaps, clusters),
        "preference_loss": clustered_ratio(losses * weights, weights, clusters),
    }


def ranking_scores(reward: ScalarModel, rankings: Rankings, *, limits: PassLimits) -> Tensor:
    """Return scores (N, R) of the responses to N prompts, on the CPU; 0 where a prompt has fewer than R."""
    sizes = rankings.sizes()
    found = torch.zeros(len(rankings), max(sizes))
    for part in passes(rankings.lengths(), limits, sequences=sizes, is_divided=True):
        progress.phase("measuring", part.done, len(rankings))
        batch = rankings.batch(part.rows).to(reward.device)
        of_batch = scores(reward, laid_out(batch.sequences, limits))
        of_prompts = of_batch.split([sizes[row] for row in part.rows])
        part.put(nn.utils.rnn.pad_sequence(list(of_prompts), batch_first=True), into=found)
    return ranks.total(found)


@torch.no_grad()
def measure_pairs(reward: ScalarModel, pairs: Completions, *, limits: PassLimits) -> dict[str, Estimate]:
    """Return accuracy, Bradley-Terry loss (nats) and mean score gap over held-out pairs; those of a prompt are one cluster.

    Margins are left out, since they only shape the loss: a pair counts as right if the chosen response scores higher.
    So numbers of data with and without margins can be compared.
    """
    both = torch.zeros(len(pairs), 2)
    for part in passes(pairs.lengths(), limits, sequences=len(SIDES), is_divided=True):
        progress.phase("measuring", part.done, len(pairs))
        batch = laid_out(pairs.batch(part.rows).to(reward.device), limits)
        part.put(torch.stack(scores(reward, batch).chunk(2), dim=1), into=both)
    measured = measure(*ranks.total(both).unbind(dim=1))
    clusters = pairs.clusters()
    return {
        "pair_accuracy": clustered_mean(measured.correct, clusters),
        "score_gap": clustered_mean(measured.score_gap, clusters),
        "preference_loss": clustered_mean(measured.loss, clusters),
    }


@torch.no_grad()
def mean_score(reward: ScalarModel, examples: Completions, *, limits: PassLimits) -> float:
    """Return the mean score of the first demonstrations, in the reward model's own unit."""
    count = min(len(examples), CENTRE_ROWS)
    total = 0.0
    for part in passes(examples.lengths(range(count)), limits):
        batch = examples.batch(part.rows).to(reward.device)
        total += part.weight * float(scores(reward, batch).double().sum())
    return ranks.total(total) / count
