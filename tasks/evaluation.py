"""Evaluation: a candidate against a baseline on the test prompts, which nothing was trained or selected on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.uncertainty import Estimate, clustered_mean
from models.folders import load_policy
from models.policy import PolicyModel
from schemas.recipe.stages import PolicyEvaluation
from schemas.records.job import StageJob, StageResult
from tasks.data.encoding_counts import encoding_metrics
from tasks.data.examples import Codec, Prompts, codec_of, read_prompts
from tasks.data.rows import write_rows
from tasks.data.splits import TEST
from tasks.rewards.model_scores import TokenizersDiffer
from tasks.rollout.engine import RolloutEngine, load_engine
from tasks.rollout.judging import Judgement, load_judge
from tasks.rollout.rollouts import Sampled, sample_responses
from tasks.training.measured import (
    clusters_of,
    defined,
    uncertainty_of,
    values_of,
)
from tasks.training.networks import placed
from tasks.training.optimization import training_device
from tasks.training.progress import RUNNING, Progress, within
from tasks.training.scratch import PROGRESS
from tasks.training.seeds import derive_seed, stage_seed

NUM_SHOWN = 3
"""Prompts of which both models' responses are handed back to be shown."""


@dataclass(frozen=True)
class Sampler:
    """One of the two models, and what it answers."""

    engine: RolloutEngine
    codec: Codec
    prompts: Prompts


@dataclass(frozen=True)
class Judged:
    """One model's responses to the test prompts, with a judgement (B,) of each: right (1 or 0), or a score."""

    sampled: Sampled
    judgements: Tensor


def run(job: StageJob[PolicyEvaluation]) -> StageResult:
    """Sample both models on the same prompts and judge them; the artifact holds every response."""
    work = job.work
    name = "accuracy" if work.judge.verifier is not None else "score"
    prompts_of: dict[str, Prompts] = {}
    judged: dict[str, Judged] = {}
    greedy: dict[str, Judged] = {}

    # 1. The same prompts, sampled and judged for both
    progress = Progress(job.scratch / PROGRESS, total=4, phase=RUNNING)
    progress.update(0)
    judge = load_judge(
        job,
        work.judge,
        policies=["baseline", "candidate"],
        device=training_device(),
        microbatch_size=work.microbatch_size,
    )
    for number, role in enumerate(("baseline", "candidate")):
        sampler = load_sampler(job, role)
        prompts_of[role] = sampler.prompts
        for step, results in enumerate((judged, greedy), start=1 + 2 * number):
            with within(f"{role}, greedy" if results is greedy else role):
                results[role] = respond(job, sampler, judge, greedy=results is greedy)
            headline = f"{role} {name}"
            progress.update(
                step, metrics={headline: results[role].judgements.mean().item()}, headline=headline
            )
        del sampler  # before the next one is loaded
    if prompts_of["baseline"].texts != prompts_of["candidate"].texts:
        raise TokenizersDiffer(
            f"candidate={work.candidate!r} and baseline={work.baseline!r} do not fit the same prompts into "
            f"generation.max_prompt_tokens={job.generation.max_prompt_tokens}; raise it"
        )

    # 2. Compare
    estimates = compare(judged, greedy, name=name)
    gain = f"{name}_gain"
    metrics = {
        **values_of(estimates),
        f"{gain}_standard_error": defined(estimates[gain].standard_error),
        "reward_spread": reward_spread(judged),
        **encoding_metrics(job, "prompts", [prompts_of["candidate"]]),
    }

    # 3. Keep every response
    for role, responses in judged.items():
        write_rows(job.output, role, response_rows(responses))
    return StageResult(metrics=metrics, uncertainty=uncertainty_of(estimates), samples=shown(judged))


def load_sampler(job: StageJob[PolicyEvaluation], role: str) -> Sampler:
    """The policy in ``role``, with the test prompts as its tokenizer has them."""
    work = job.work
    codec = codec_of(job, role)
    policy = placed(lambda: PolicyModel(load_policy(job.inputs[role])), job.inputs[role], training_device())
    return Sampler(
        engine=load_engine(policy, codec, microbatch_size=work.microbatch_size),
        codec=codec,
        prompts=read_prompts(job.inputs["prompts"], TEST, codec),
    )


def respond(job: StageJob[PolicyEvaluation], sampler: Sampler, judge: Judgement, *, greedy: bool) -> Judged:
    """Responses to the test prompts, judged; greedy ones once, sampled ones as often as the recipe says."""
    work = job.work
    sampled = sample_responses(
        sampler.engine,
        sampler.codec,
        sampler.prompts,
        range(len(sampler.prompts)),
        device=training_device(),
        # both models draw from the same stream, so that their difference carries less noise
        seed=derive_seed(stage_seed(job), "sampling"),
        count=1 if greedy else work.samples_per_prompt,
        greedy=greedy,
    )
    return Judged(sampled=sampled, judgements=judge(sampled))


def compare(judged: dict[str, Judged], greedy: dict[str, Judged], *, name: str) -> dict[str, Estimate]:
    """Means of both models' judgements (called ``name``), their difference, lengths and truncations, each with its error.

    Judgements are compared response by response. All responses to one prompt are one cluster, also where the prompt
    stands in several rows of the test split.
    """
    candidate, baseline = judged["candidate"], judged["baseline"]
    prompts = clusters_of(candidate.sampled.prompts)
    difference = candidate.judgements.double() - baseline.judgements.double()
    measured = {
        name: candidate.judgements,
        f"baseline_{name}": baseline.judgements,
        f"{name}_gain": difference,
        "win_rate": (difference > 0).double() + 0.5 * (difference == 0),
        "truncated_share": (~candidate.sampled.ended).double(),
        "mean_response_length": candidate.sampled.sequences.lengths,
        "baseline_mean_response_length": baseline.sampled.sequences.lengths,
    }
    estimates = {metric: clustered_mean(values, prompts) for metric, values in measured.items()}
    for role, metric in (("candidate", f"greedy_{name}"), ("baseline", f"baseline_greedy_{name}")):
        rows = clusters_of(greedy[role].sampled.prompts)
        estimates[metric] = clustered_mean(greedy[role].judgements, rows)
    return estimates


def reward_spread(judged: dict[str, Judged]) -> float:
    """Highest less lowest judgement of all sampled responses; 0 where all are equal."""
    judgements = torch.cat([results.judgements for results in judged.values()])
    return (judgements.max() - judgements.min()).item()


def response_rows(judged: Judged) -> list[dict[str, object]]:
    """Every response as a row of Parquet."""
    sampled = judged.sampled
    columns = (sampled.prompts, sampled.responses, sampled.ended.tolist(), judged.judgements.tolist())
    return [
        {"prompt": prompt, "response": response, "ended": ended, "judgement": judgement}
        for prompt, response, ended, judgement in zip(*columns, strict=True)
    ]


def shown(judged: dict[str, Judged]) -> tuple[dict[str, object], ...]:
    """Both models' first responses to a few prompts, each prompt once, whoever did better.

    The first prompts at which the two say different things; where those are too few, the first others.
    """
    candidate, baseline = judged["candidate"], judged["baseline"]
    prompts = candidate.sampled.prompts
    rows = [prompts.index(prompt) for prompt in dict.fromkeys(prompts)]
    responses = (candidate.sampled.responses, baseline.sampled.responses)
    first_rows = sorted(rows, key=lambda row: responses[0][row] == responses[1][row])[:NUM_SHOWN]
    return tuple(
        {
            "prompt": prompts[row],
            "baseline": baseline.sampled.responses[row],
            "baseline_judgement": baseline.judgements[row].item(),
            "candidate": candidate.sampled.responses[row],
            "candidate_judgement": candidate.judgements[row].item(),
        }
        for row in first_rows
    )
