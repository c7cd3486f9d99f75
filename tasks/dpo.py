"""Direct preference optimisation: the policy itself learns preference pairs, kept near a frozen reference.

Other losses on the same pairs are switches (``loss``); ``simpo`` and ``orpo`` read no reference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vantage.algorithms.preference_loss import measure_pairs as measure
from vantage.algorithms.supervised_loss import token_nll
from vantage.algorithms.uncertainty import Estimate, clustered_mean
from vantage.models.folders import tokenizer_digest
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.resolved import ResolvedDirectPreferenceOptimization
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import comparison_metrics
from vantage.tasks.data.examples import Codec, Completions, codec_of, read_completions
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.rollout.collected import read_collected
from vantage.tasks.rollout.collected_pairs import best_against_worst
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.found_limits import longest_row
from vantage.tasks.training.gradients import backward
from vantage.tasks.training.measured import uncertainty_of, values_of
from vantage.tasks.training.metric_sums import LossSums, MetricSums
from vantage.tasks.training.networks import write_policy
from vantage.tasks.training.optimization import Precision
from vantage.tasks.training.passes import laid_out, passes
from vantage.tasks.updates.against_reference import Models, both_logprobs
from vantage.tasks.updates.pair_objective import (
    PairLogprobs,
    held_out_losses,
    loss_of,
    rewards_of,
    takes_means,
)
from vantage.tasks.updates.trained_against_reference import load_models, train_on_rows

SIDES = ("chosen", "rejected")
CURVES = {"pair_accuracy": "train_pair_accuracy", "nll": "chosen_nll"}
"""Metrics of the losses under the names that the ledger uses for a minibatch."""


def run(job: StageJob[ResolvedDirectPreferenceOptimization]) -> StageResult:
    """Train ``init`` on the pairs of ``data`` against ``reference``; the artifact is a policy."""
    # 1. The policy, its reference, and every pair as ids
    models = load_models(job, reads_reference=job.work.reads_reference)
    codec = codec_of(job, "init")
    train, validation, test = pairs = [read_pairs(job, split, codec) for split in SPLITS]
    encoding = comparison_metrics(job, "data", pairs) | tied_share(job, pairs)

    # 2. Optimiser steps
    longest = longest_row(train, shares_prompt=job.work.pass_limits.share_prompts)
    work = train_on_rows(job, models, train, longest=longest, accumulate=accumulate_preferences)

    # 3. Measure how well the policy separates pairs that it has not seen
    held_out = measure_pairs(models, test, work)
    selected = measure_pairs(models, validation, work)
    written = write_policy(job, models.policy.causal_lm, codec.tokenizer)
    measured = {**held_out, **{f"validation_{name}": value for name, value in selected.items()}}
    return StageResult(
        metrics={**values_of(measured), **encoding},
        uncertainty=uncertainty_of(measured),
        tokenizer_digest=tokenizer_digest(job.output),
        base=written.base,
        same_as_base=written.same_as_base,
    )


def read_pairs(job: StageJob[ResolvedDirectPreferenceOptimization], split: str, codec: Codec) -> Completions:
    """Return the pairs of one split: of a dataset, or each prompt's best collected response against its worst."""
    if job.work.rollouts is None:
        return read_completions(job.inputs["data"], split, SIDES, codec)
    digest = tokenizer_digest(job.inputs["init"])
    collected = read_collected(job.inputs["rollouts"], split, codec, tokenizer=digest)
    return best_against_worst(collected, codec, split=split)


def tied_share(
    job: StageJob[ResolvedDirectPreferenceOptimization], pairs: Sequence[Completions]
) -> dict[str, float]:
    """Return the share of the collected prompts, over all splits, that gave no pair."""
    if job.work.rollouts is None:
        return {}
    return {"tied_share": 1 - sum(map(len, pairs)) / sum(each.counts.num_rows for each in pairs)}


def accumulate_preferences(
    models: Models, pairs: Completions, indices: Sequence[int], work: ResolvedDirectPreferenceOptimization
) -> tuple[dict[str, float], int]:
    """Add the gradient of the minibatch's mean loss, micro-batch by micro-batch; returns its metrics and tokens."""
    sums, losses, num_tokens = MetricSums(), LossSums(), 0
    num_pairs = float(len(indices))
    num_chosen = float(sum(len(pairs.response_ids["chosen"][index]) for index in indices))
    for part in passes(pairs.lengths(indices), work.pass_limits, sequences=len(SIDES), is_divided=True):
        batch = pairs.batch([indices[row] for row in part.rows]).to(models.policy.device)
        batch = laid_out(batch, work.pass_limits)
        logprobs = pair_logprobs(models, batch, precision=work.arithmetic, means=takes_means(work))
        preference = loss_of(logprobs, work, denominator=num_pairs)
        loss = preference.loss
        # The NLL is trained on only by ORPO, and watched otherwise: if it rises while the pairs are learnt, chosen
        # responses become unlikely too
        chosen_rows = slice(0, len(batch) // 2)
        chosen = logprobs.per_token[chosen_rows]
        nll = token_nll(
            chosen if work.loss == "orpo" else chosen.detach(),
            batch.response_mask[chosen_rows],
            denominator=num_chosen,
        )
        if work.loss == "orpo":
            loss = nll.loss + loss
        backward(part.weight * loss, models.policy, is_last=part.is_last)
        sums.add(nll, part.weight)
        sums.add(preference, part.weight)
        losses.add("loss", loss, part.weight)
        num_tokens += int(part.weight) * sum(batch.known.totals)
    means = {CURVES.get(name, name): mean for name, mean in sums.means().items()}
    return {**losses.totals(), **means}, ranks.total(num_tokens)


def pair_logprobs(
    models: Models, batch: Sequences, *, precision: Precision, means: bool = False
) -> PairLogprobs:
    """Return both models' log-probabilities of a batch of pairs: N chosen sides, then their N rejected ones.

    ``means``: take the mean over each response's tokens instead of their sum.
    """
    per_token, of_reference = both_logprobs(models, batch, precision=precision)
    lengths = batch.response_mask.sum(dim=1) if means else None
    chosen, rejected = _of_responses(per_token, lengths).chunk(2)
    if of_reference is None:
        return PairLogprobs(chosen, rejected, None, None, per_token)
    ref_chosen, ref_rejected = _of_responses(of_reference, lengths).chunk(2)
    return PairLogprobs(chosen, rejected, ref_chosen, ref_rejected, per_token)


def _of_responses(per_token: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the log-probabilities of whole responses (n,): sums over the tokens of (n,T), or with ``lengths`` (n,) means."""
    sums = per_token.sum(dim=1)
    return sums if lengths is None else sums / lengths


@torch.no_grad()
def measure_pairs(
    models: Models, pairs: Completions, work: ResolvedDirectPreferenceOptimization
) -> dict[str, Estimate]:
    """Return the accuracy of the rewards that the loss compares, the loss (nats) and the mean reward gap over pairs.

    All pairs of a prompt are one cluster.
    """
    both = torch.zeros(len(pairs), 2)
    limits = work.pass_limits.or_rows(work.batch_size)
    for part in passes(pairs.lengths(), limits, sequences=len(SIDES), is_divided=True):
        progress.phase("measuring", part.done, len(pairs))
        batch = laid_out(pairs.batch(part.rows).to(models.policy.device), limits)
        logprobs = pair_logprobs(models, batch, precision=work.arithmetic, means=takes_means(work))
        part.put(torch.stack(rewards_of(logprobs, work), dim=1), into=both)
    measured = measure(*ranks.total(both).unbind(dim=1))
    clusters = pairs.clusters()
    return {
        "pair_accuracy": clustered_mean(measured.correct, clusters),
        "preference_loss": clustered_mean(held_out_losses(measured.score_gap, work), clusters),
        "reward_gap": clustered_mean(measured.score_gap, clusters),
    }
