"""Compare the responses of two policies to the same prompts: every estimate of an evaluation."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp

import torch
from torch import Tensor

from vantage.algorithms.kl import kl_estimate
from vantage.algorithms.length_control import length_controlled_win_rate
from vantage.algorithms.response_statistics import distinct_ngrams, pass_at_k
from vantage.algorithms.swapped_verdicts import SwappedVerdicts
from vantage.algorithms.uncertainty import (
    Estimate,
    clustered_mean,
    clustered_ratio,
    with_cluster_sizes,
    with_differing,
)
from vantage.algorithms.wins import wins_of
from vantage.schemas.metric_names import DISTINCT, PASS_AT
from vantage.tasks.rollout.rollouts import Sampled
from vantage.tasks.training.likelihood import MeasuredLikelihood
from vantage.tasks.training.measured import clusters_of
from vantage.tasks.training.resampling import Statistic, bootstrapped

Estimates = dict[str, Estimate]
"""Metric → estimate."""


@dataclass(frozen=True)
class Judged:
    """One model's responses to the test prompts (those to one prompt are adjacent), with the judges' judgements."""

    sampled: Sampled
    judgements: dict[str, Tensor]
    """``accuracy`` (right, 1 or 0), ``score`` or ``preference`` (1 where this response wins, ½ in a tie, else 0) → (B,), on the
    CPU; the stage's ``judge`` first, then ``also``."""


@dataclass(frozen=True)
class Pairs:
    """The i-th response of the candidate to each prompt beside the baseline's i-th."""

    candidate: Judged
    baseline: Judged
    samples_per_prompt: int
    seed: int
    """Seed of the resamples."""

    @property
    def clusters(self) -> Tensor:
        """Number of each pair's prompt (B,); a prompt in several rows of the test split counts as one."""
        return clusters_of(self.candidate.sampled.prompts)

    @property
    def are_equal(self) -> Tensor:
        """Return which pairs (B,) have two equal responses. They are ties, although their scores may differ by rounding:
        they come from two batches."""
        sides = [
            zip(each.responses, each.sequences.response_rows(), each.ended.tolist(), strict=True)
            for each in (self.candidate.sampled, self.baseline.sampled)
        ]
        return torch.tensor([ours == theirs for ours, theirs in zip(*sides, strict=True)])

    @property
    def length_differences(self) -> Tensor:
        """Tokens of the candidate's response less those of the baseline's response, (B,)."""
        candidate, baseline = (
            each.sampled.sequences.lengths.cpu() for each in (self.candidate, self.baseline)
        )
        return candidate - baseline


def compare_judgements(pairs: Pairs) -> Estimates:
    """Return means of both models' judgements and their difference, win rates and pass@k, by every judge."""
    estimates: Estimates = {}
    for place, name in enumerate(pairs.candidate.judgements):
        candidate, baseline = (each.judgements[name].double() for each in (pairs.candidate, pairs.baseline))
        if name == "score":  # a model's score has rounding; a verdict has none
            candidate = torch.where(pairs.are_equal, baseline, candidate)
        difference = candidate - baseline
        if name != "preference":  # a preference does not judge a single response
            measured = {name: candidate, f"baseline_{name}": baseline, f"{name}_gain": difference}
            estimates |= {metric: _mean(each, pairs.clusters) for metric, each in measured.items()}
        if name == "accuracy":
            estimates["accuracy_gain"] = with_differing(estimates["accuracy_gain"], difference)
        estimates |= _win_rates(pairs, difference, prefix=f"{name}_" if place else "")
        if name == "accuracy":
            estimates |= _pass_at(pairs, candidate, baseline)
    return estimates


def order_disagreement(pairs: Pairs, verdicts: SwappedVerdicts) -> Estimates:
    """Return the share of pairs of different responses on which a judge gives another verdict in the other order.

    For two equal responses, each order prefers the same position, if any, so the orders always disagree.
    """
    differ = ~pairs.are_equal
    disagree = torch.where(differ, verdicts.disagree.double(), torch.nan)
    return {"order_disagreement": _mean_of_defined(disagree, pairs.clusters)}


def _win_rates(pairs: Pairs, difference: Tensor, *, prefix: str) -> Estimates:
    """Return win rate, ties and length-controlled win rate, pair by pair; ``difference`` (B,) of the judgements."""
    wins = wins_of(difference)
    controlled: Statistic = partial(length_controlled_win_rate, wins, pairs.length_differences)
    at_equal_lengths = bootstrapped(controlled, pairs.clusters, seed=pairs.seed)
    return {
        f"{prefix}win_rate": with_differing(_mean(wins, pairs.clusters), difference.sign()),
        f"{prefix}tied_pairs": _mean((difference == 0).double(), pairs.clusters),
        f"{prefix}length_controlled_win_rate": with_differing(
            with_cluster_sizes(at_equal_lengths, pairs.clusters), difference.sign()
        ),
    }


def _pass_at(pairs: Pairs, candidate: Tensor, baseline: Tensor) -> Estimates:
    """Estimate pass@k from verdicts (B,), for every k up to the samples per prompt."""
    count = pairs.samples_per_prompt
    rows = pairs.clusters[::count]
    right = [verdicts.view(-1, count).sum(dim=1).long() for verdicts in (candidate, baseline)]
    estimates: Estimates = {}
    for k in (k for k in PASS_AT if k <= count):
        ours, theirs = (pass_at_k(each, num_samples=count, k=k) for each in right)
        estimates |= _of_both(f"pass_at_{k}", ours, theirs, rows)
    return estimates


def compare_texts(pairs: Pairs) -> Estimates:
    """Return lengths, truncation and distinct-n of both models."""
    candidate, baseline = pairs.candidate.sampled, pairs.baseline.sampled
    truncated = [(~each.ended).double().cpu() for each in (candidate, baseline)]
    lengths = [each.sequences.lengths.double().cpu() for each in (candidate, baseline)]
    estimates = _of_both("truncated_share", truncated[0], truncated[1], pairs.clusters)
    differ = with_differing(estimates["truncated_share_difference"], truncated[0] - truncated[1])
    estimates["truncated_share_difference"] = differ
    estimates |= _of_both("mean_response_length", lengths[0], lengths[1], pairs.clusters)
    rows = pairs.clusters[:: pairs.samples_per_prompt]
    of_prompts = [_responses_of_rows(each, pairs.samples_per_prompt) for each in (candidate, baseline)]
    for n in DISTINCT:
        ours, theirs = (distinct_ngrams(each, n=n) for each in of_prompts)
        estimates |= _of_both(f"distinct_{n}", ours, theirs, rows)
    return estimates


def _responses_of_rows(sampled: Sampled, count: int) -> list[list[list[int]]]:
    """Return row of the test split → ids of its ``count`` responses, without the token that ended each."""
    lengths = (sampled.sequences.lengths - sampled.ended.long()).tolist()
    ids = [row[:length] for row, length in zip(sampled.sequences.response_ids.tolist(), lengths, strict=True)]
    return [ids[start : start + count] for start in range(0, len(ids), count)]


def divergence(sampled: Sampled, logprobs: Tensor, baseline_logprobs: Tensor) -> Estimates:
    """Return KL(candidate‖baseline) by k3 on the candidate's own responses; log-probabilities (B,T) of their tokens."""
    mask = sampled.sequences.response_mask
    per_token = kl_estimate(logprobs.double(), baseline_logprobs.double(), kind="k3")
    of_responses = per_token.masked_fill(~mask, 0.0).sum(dim=1).cpu()
    clusters = clusters_of(sampled.prompts)
    return {
        "kl_to_baseline": clustered_mean(of_responses, clusters),
        "kl_to_baseline_per_token": clustered_ratio(of_responses, mask.sum(dim=1).cpu(), clusters),
    }


def compare_likelihoods(candidate: MeasuredLikelihood, baseline: MeasuredLikelihood) -> Estimates:
    """Return perplexity and NLL per response of both models on the same demonstrations.

    A perplexity is e^a with the NLL per token a; its standard error is e^a times that of a. The logarithm of the ratio is also
    a ratio of sums, Σ (nll − baseline nll) / Σ tokens, where both models read the same tokens.
    """
    of_models = {"": candidate, "baseline_": baseline}
    estimates = {
        f"{prefix}perplexity": _exponential(each.nll, each.num_tokens, each.clusters)
        for prefix, each in of_models.items()
    }
    ratio = _exponential(candidate.nll - baseline.nll, candidate.num_tokens, candidate.clusters)
    value = estimates["perplexity"].value / estimates["baseline_perplexity"].value
    estimates["perplexity_ratio"] = replace(ratio, value=value)
    return estimates | _of_both("response_nll", candidate.nll, baseline.nll, candidate.clusters)


def _exponential(sums: Tensor, tokens: Tensor, clusters: Tensor) -> Estimate:
    """Return e^(Σ sums / Σ tokens); its standard error is that of the exponent times the result."""
    logarithm = with_cluster_sizes(clustered_ratio(sums, tokens, clusters), clusters)
    value = exp(logarithm.value)
    return replace(logarithm, value=value, standard_error=value * logarithm.standard_error)


def _of_both(name: str, candidate: Tensor, baseline: Tensor, clusters: Tensor) -> Estimates:
    """Return means of both models and of their difference; rows with an undefined value (NaN) are left out."""
    values = {name: candidate, f"baseline_{name}": baseline, f"{name}_difference": candidate - baseline}
    return {metric: _mean_of_defined(each, clusters) for metric, each in values.items()}


def _mean(values: Tensor, clusters: Tensor) -> Estimate:
    return with_cluster_sizes(clustered_mean(values, clusters), clusters)


def _mean_of_defined(values: Tensor, clusters: Tensor) -> Estimate:
    """Return the mean of the values that are not NaN; NaN where all are."""
    kept = ~values.isnan()
    if bool(kept.any()):
        return _mean(values[kept], clusters[kept])
    return undefined([""], clusters.tolist())[""]


def undefined(metrics: Iterable[str], prompts: Sequence[Hashable]) -> Estimates:
    """Return metrics without a value, for rows of these prompts."""
    nan, clusters = float("nan"), len(set(prompts))
    return dict.fromkeys(metrics, Estimate(nan, nan, num_clusters=clusters, num_rows=len(prompts)))


def greedy_means(judged: dict[str, Judged]) -> Estimates:
    """Return means of the judgements of greedy responses, by role: ``greedy_accuracy`` and so on; empty if there are none."""
    estimates: Estimates = {}
    for role, prefix in (("candidate", ""), ("baseline", "baseline_")):
        if role not in judged:
            continue
        clusters = clusters_of(judged[role].sampled.prompts)
        for name, judgements in judged[role].judgements.items():
            estimates[f"{prefix}greedy_{name}"] = _mean(judgements, clusters)
    return estimates
