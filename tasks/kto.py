"""Kahneman-Tversky optimisation: the policy learns single responses that are desirable or not, near a frozen reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vantage.algorithms.kto_loss import clamped_kl, kto, kto_losses, label_margins, label_weights
from vantage.algorithms.metrics import SumCount
from vantage.algorithms.preference_loss import implicit_rewards
from vantage.algorithms.uncertainty import Estimate, clustered_mean
from vantage.models.folders import tokenizer_digest
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.resolved import ResolvedKahnemanTverskyOptimization
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import Completions, codec_of
from vantage.tasks.data.labelled import label_weight_ratio, mismatched, read_labelled
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.gradients import backward
from vantage.tasks.training.measured import mean_among, uncertainty_of, values_of
from vantage.tasks.training.memory_probe import Row
from vantage.tasks.training.metric_sums import LossSums, MetricSums
from vantage.tasks.training.networks import write_policy
from vantage.tasks.training.optimization import Precision
from vantage.tasks.training.passes import laid_out, passes
from vantage.tasks.updates.against_reference import Models, both_logprobs
from vantage.tasks.updates.trained_against_reference import load_models, train_on_rows


def run(job: StageJob[ResolvedKahnemanTverskyOptimization]) -> StageResult:
    """Train ``init`` on the labelled responses of ``data`` against ``reference``; the artifact is a policy."""
    # 1. The policy, its reference, and every response as ids
    models = load_models(job, reads_reference=True)
    codec = codec_of(job, "init")
    train, validation, test = rows = [read_labelled(job, split, codec) for split in SPLITS]
    encoding = encoding_metrics(job, "data", rows)
    weight_ratio = label_weight_ratio(train, job.work, stage=job.name)

    # 2. Optimiser steps
    longest = longest_mismatched(train, shares_prompt=job.work.pass_limits.share_prompts)
    work = train_on_rows(job, models, train, longest=longest, accumulate=accumulate_labelled)

    # 3. Measure how far the policy follows labels that it has not seen
    measured: dict[str, Estimate] = {}
    points: dict[str, float] = {}
    for prefix, split in (("", test), ("validation_", validation)):
        found, point = measure_labelled(models, split, work)
        measured |= {f"{prefix}{name}": value for name, value in found.items()}
        points[f"{prefix}reference_point"] = point
    written = write_policy(job, models.policy.causal_lm, codec.tokenizer)
    return StageResult(
        metrics={**values_of(measured), **points, "label_weight_ratio": weight_ratio, **encoding},
        uncertainty=uncertainty_of(measured),
        tokenizer_digest=tokenizer_digest(job.output),
        base=written.base,
        same_as_base=written.same_as_base,
    )


def longest_mismatched(train: Completions, *, shares_prompt: bool) -> Row:
    """Return a row of the longest prompt with the longest response: a pass over mismatched responses may hold both."""
    prompts, responses = train.prompt_ids, train.response_ids["response"]
    return Row(max(map(len, prompts)), max(map(len, responses)), shares_prompt)


def accumulate_labelled(
    models: Models, rows: Completions, indices: Sequence[int], work: ResolvedKahnemanTverskyOptimization
) -> tuple[dict[str, float], int]:
    """Add the gradient of the minibatch's mean loss, micro-batch by micro-batch; returns its metrics and tokens.

    The reference point comes first, from the whole minibatch over all ranks, so that no size of a pass changes it.
    """
    assert rows.labels is not None
    limits = work.pass_limits
    point = reference_point(models, rows, indices, limits=limits, precision=work.arithmetic)
    sums, losses, num_tokens = MetricSums(), LossSums(), 0
    for part in passes(rows.lengths(indices), limits, is_divided=True):
        chosen = [indices[row] for row in part.rows]
        batch = laid_out(rows.batch(chosen).to(models.policy.device), limits)
        logprobs, ref_logprobs = response_logprobs(models, batch, precision=work.arithmetic)
        found = kto(
            logprobs,
            ref_logprobs,
            labels_at(rows, chosen, logprobs.device),
            reference_point=point,
            beta=work.beta,
            desirable_weight=work.desirable_weight,
            undesirable_weight=work.undesirable_weight,
            denominator=float(len(indices)),
        )
        backward(part.weight * found.loss, models.policy, is_last=part.is_last)
        sums.add(found, part.weight)
        losses.add("loss", found.loss, part.weight)
        num_tokens += int(part.weight) * sum(batch.known.totals)
    metrics = {**losses.totals(), **sums.means(), "reference_point": point}
    return metrics, ranks.total(num_tokens)


@torch.no_grad()
def reference_point(
    models: Models, rows: Completions, indices: Sequence[int], *, limits: PassLimits, precision: Precision
) -> float:
    """Return KTO's z: the mean of log π/π_ref over responses to other prompts of these rows, or 0 if that is negative."""
    others = mismatched(rows, indices)
    total, count = 0.0, len(others)
    if count:
        ratios = torch.zeros(count, dtype=torch.float64)
        for part in passes(others.lengths(), limits, is_divided=True):
            batch = laid_out(others.batch(part.rows).to(models.policy.device), limits)
            logprobs, ref_logprobs = response_logprobs(models, batch, precision=precision)
            part.put(logprobs.double() - ref_logprobs.double(), into=ratios)
        total = float(ranks.total(ratios).sum())
    return clamped_kl(SumCount(torch.tensor(total, dtype=torch.float64), torch.tensor(count)))


def response_logprobs(models: Models, batch: Sequences, *, precision: Precision) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (n,) of whole responses, in nats, under the policy and under its reference."""
    per_token, of_reference = both_logprobs(models, batch, precision=precision)
    assert of_reference is not None
    return per_token.sum(dim=1), of_reference.sum(dim=1)


def labels_at(rows: Completions, indices: Sequence[int], device: torch.device) -> Tensor:
    """Return whether each row's response is desirable, (n,)."""
    assert rows.labels is not None
    return torch.tensor([bool(rows.labels[index]) for index in indices], device=device)


@torch.no_grad()
def measure_labelled(
    models: Models, rows: Completions, work: ResolvedKahnemanTverskyOptimization
) -> tuple[dict[str, Estimate], float]:
    """Return the mean margins of desirable and undesirable responses and the mean loss, and the reference point of all rows.

    All responses to a prompt are one cluster. The reference point counts as known. A margin is NaN if no row has its label.
    """
    limits = work.pass_limits.or_rows(work.batch_size)
    every = range(len(rows))
    point = reference_point(models, rows, every, limits=limits, precision=work.arithmetic)
    rewards = torch.zeros(len(rows))
    for part in passes(rows.lengths(), limits, is_divided=True):
        progress.phase("measuring", part.done, len(rows))
        batch = laid_out(rows.batch(part.rows).to(models.policy.device), limits)
        logprobs, ref_logprobs = response_logprobs(models, batch, precision=work.arithmetic)
        part.put(implicit_rewards(logprobs, ref_logprobs, beta=work.beta), into=rewards)
    is_desirable = labels_at(rows, every, rewards.device)
    margins = label_margins(ranks.total(rewards).double(), is_desirable, reference_reward=work.beta * point)
    weights = label_weights(
        is_desirable, desirable=work.desirable_weight, undesirable=work.undesirable_weight
    )
    clusters = rows.clusters()
    return {
        "desirable_margin": mean_among(margins, clusters, is_desirable),
        "undesirable_margin": mean_among(margins, clusters, ~is_desirable),
        "kto_loss": clustered_mean(weights * kto_losses(margins), clusters),
    }, point
