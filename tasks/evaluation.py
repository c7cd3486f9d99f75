"""Evaluate a candidate against a baseline on the test prompts, which were not used for training or selection."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vantage.algorithms.swapped_verdicts import SwappedVerdicts
from vantage.algorithms.uncertainty import Estimate
from vantage.models.folders import tokenizer_digest
from vantage.models.heads import ScalarModel, load_scalar, values
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences
from vantage.schemas.metric_names import JUDGED
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import Codec, Completions, Prompts, codec_of, read_completions, read_prompts
from vantage.tasks.data.rows import write_rows
from vantage.tasks.data.splits import TEST
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.rollout.comparison import (
    Estimates,
    Judged,
    Pairs,
    compare_judgements,
    compare_likelihoods,
    compare_texts,
    divergence,
    greedy_means,
    order_disagreement,
    undefined,
)
from vantage.tasks.rollout.engine import RolloutEngine, load_engine
from vantage.tasks.rollout.fitting_engine import fit_to_memory
from vantage.tasks.rollout.judging import Judgement, judge_within, load_judge
from vantage.tasks.rollout.prompted_judge import judge_pairs, load_prompted_judge
from vantage.tasks.rollout.rollouts import per_token, sample_responses
from vantage.tasks.rollout.token_texts import ByToken, first_responses, with_tokens
from vantage.tasks.training.found_limits import taken_by_reading
from vantage.tasks.training.likelihood import MeasuredLikelihood, measure_likelihood
from vantage.tasks.training.measured import defined, uncertainty_of, values_of
from vantage.tasks.training.networks import fixed_policy, placed
from vantage.tasks.training.optimization import training_device
from vantage.tasks.training.progress import RUNNING, Progress, within
from vantage.tasks.training.scratch import PROGRESS
from vantage.tasks.training.seeds import derive_seed, stage_seed

ROLES = ("candidate", "baseline")
"""Order in which the models are loaded: the baseline reads the candidate's responses."""
NUM_SHOWN = 20
"""Number of prompts for which both models' responses are returned to be shown."""

DEMONSTRATIONS_AT_ONCE = 64
"""Number of demonstrations in one forward pass if ``microbatch_size`` is not given."""


@dataclass(frozen=True)
class Sampler:
    """One of the two models, with its prompts and demonstrations."""

    policy: PolicyModel
    engine: RolloutEngine
    codec: Codec
    prompts: Prompts
    demonstrations: Completions | None
    limits: PassLimits
    """Bounds of the passes that read the model's responses."""


@dataclass(frozen=True)
class Measured:
    """Results of one model, which are kept when the other model is loaded."""

    prompts: Prompts
    sampled: Judged
    greedy: Judged | None
    """The judged greedy responses; None: no judge judges single responses."""
    likelihood: MeasuredLikelihood | None
    """Likelihood of the demonstrations, if the stage has any."""
    codec: Codec


def run(job: StageJob[PolicyEvaluation]) -> StageResult:
    """Sample both models on the same prompts and judge them; the artifact contains every response."""
    work = job.work
    measured: dict[str, Measured] = {}
    logprobs: dict[str, Tensor] = {}

    # 1. Sample and judge the same prompts with both models; both read the same demonstrations and responses
    refuse_other_tokenizer_of_critic(job)
    judges = load_judges(job)
    kinds = (False, True) if judges else (False,)  # sampled, greedy
    progress = Progress(job.scratch / PROGRESS, total=len(ROLES) * len(kinds), phase=RUNNING)
    progress.update(0)
    for number, role in enumerate(ROLES):
        sampler = load_sampler(job, role)
        responses = []
        for step, greedy in enumerate(kinds, start=1 + len(kinds) * number):
            with within(f"{role}, greedy" if greedy else role):
                responses.append(respond(job, sampler, judges, greedy=greedy))
            means = {f"{role} {each}": said.mean().item() for each, said in responses[-1].judgements.items()}
            progress.update(step, metrics=means, headline=next(iter(means), None))
        with within(role):
            measured[role] = finish_reading(sampler, *responses)
            if share_a_tokenizer(job):
                read = measured["candidate"].sampled.sampled.sequences
                logprobs[role] = logprobs_of(job, sampler, read)
        del sampler  # free it before the next one is loaded
    candidate, baseline = (measured[role] for role in ROLES)
    refuse_different_prompts(job, candidate, baseline)

    # 2. Ask the model that judges pairs, if there is one
    verdicts = ask_model(job, candidate, baseline)

    # 3. Compare
    seed = derive_seed(stage_seed(job), "resamples")
    pairs = Pairs(
        with_verdicts(work, candidate.sampled, None if verdicts is None else verdicts.wins),
        with_verdicts(work, baseline.sampled, None if verdicts is None else 1 - verdicts.wins),
        work.samples_per_prompt,
        seed,
    )
    estimates: dict[str, Estimate] = {
        **compare_judgements(pairs),
        **({} if verdicts is None else order_disagreement(pairs, verdicts)),
        **compare_texts(pairs),
        **greedy_means({role: each.greedy for role, each in measured.items() if each.greedy is not None}),
        **kl_to_baseline(candidate, logprobs),
        **perplexities(candidate, baseline, is_comparable=bool(logprobs)),
    }
    metrics = {
        **values_of(estimates),
        **{
            f"{each}_gain_standard_error": defined(estimates[f"{each}_gain"].standard_error)
            for each in judges
        },
        "reward_spread": reward_spread(pairs),
        **encoding_metrics(job, "prompts", [candidate.prompts]),
    }

    # 4. Keep every response; return some to be shown, the first of them token by token
    for role, judged in zip(ROLES, (pairs.candidate, pairs.baseline), strict=True):
        write_rows(job.output, role, response_rows(judged))
    samples = shown(pairs)
    sides = read_by_token(job, measured, samples)
    return StageResult(
        metrics=metrics, uncertainty=uncertainty_of(estimates), samples=with_tokens(samples, sides)
    )


def judges_of(work: PolicyEvaluation) -> dict[str, Judge]:
    """Return field → judge, the stage's ``judge`` first."""
    judges = {"judge": work.judge, "also": work.also}
    return {role: judge for role, judge in judges.items() if judge is not None}


def load_judges(job: StageJob[PolicyEvaluation]) -> dict[str, Judgement]:
    """Return ``accuracy`` (a verifier's) or ``score`` (a reward's) → the judge, the stage's ``judge`` first."""
    return {
        JUDGED[judge.kind]: load_judge(
            job,
            judge,
            role=role,
            policies=ROLES,
            device=training_device(),
            limits=job.work.pass_limits,
        )
        for role, judge in judges_of(job.work).items()
        if judge.kind != "model"
    }


def ask_model(
    job: StageJob[PolicyEvaluation], candidate: Measured, baseline: Measured
) -> SwappedVerdicts | None:
    """Return verdicts of the model that judges, loaded after the other two models are freed; None: there is none."""
    for role, judge in judges_of(job.work).items():
        if judge.kind == "model":
            device, limits = training_device(), job.work.pass_limits
            asked = load_prompted_judge(job, judge, role=role, device=device, limits=limits)
            with within("judging pairs"):
                return judge_pairs(asked, candidate.sampled.sampled, baseline.sampled.sampled)
    return None


def with_verdicts(work: PolicyEvaluation, judged: Judged, preference: Tensor | None) -> Judged:
    """Return one model's responses, with the verdicts (B,) on its pairs added to the judgements, in the order of the
    judges."""
    said = judged.judgements if preference is None else {**judged.judgements, "preference": preference}
    names = [JUDGED[judge.kind] for judge in judges_of(work).values()]
    return replace(judged, judgements={name: said[name] for name in names})


def load_sampler(job: StageJob[PolicyEvaluation], role: str) -> Sampler:
    """Return the policy in ``role``, with the test prompts and demonstrations encoded by its tokenizer."""
    codec = codec_of(job, role)
    work, policy = job.work, fixed_policy(job, role, training_device())
    prompts = read_prompts(job.inputs["prompts"], TEST, codec)
    demonstrations = None
    if "demonstrations" in job.inputs:
        demonstrations = read_completions(job.inputs["demonstrations"], TEST, ["response"], codec)
        encoding_metrics(job, "demonstrations", [demonstrations])  # raises if too many do not fit
    limits = work.rollout.limits(work.pass_limits)
    engine, fitting = fit_to_memory(
        load_engine(policy, codec, limits=limits, precision=work.arithmetic, rollout=work.rollout),
        job,
        taken_by_reading(policy, codec, [prompts], work),
        device=policy.device,
        other=None if role == ROLES[0] else role,
    )
    return Sampler(policy, engine, codec, prompts, demonstrations, limits=fitting.work.pass_limits)


def respond(
    job: StageJob[PolicyEvaluation], sampler: Sampler, judges: dict[str, Judgement], *, greedy: bool
) -> Judged:
    """Return judged responses to each test prompt: one if greedy, else as many as the recipe sets."""
    work = job.work
    sampled = sample_responses(
        sampler.engine,
        sampler.codec,
        sampler.prompts,
        range(len(sampler.prompts)),
        device=training_device(),
        # Both models draw from the same random numbers, so that their difference is less noisy
        seed=derive_seed(stage_seed(job), "sampling"),
        count=1 if greedy else work.samples_per_prompt,
        greedy=greedy,
    )
    judgements = {name: judge_within(judge, sampler.limits)(sampled) for name, judge in judges.items()}
    return Judged(sampled=sampled, judgements=judgements)


def finish_reading(sampler: Sampler, sampled: Judged, greedy: Judged | None = None) -> Measured:
    """Return the results of a model, with the likelihood of the demonstrations."""
    likelihood, demonstrations = None, sampler.demonstrations
    if demonstrations is not None:
        limits = sampler.limits.or_rows(DEMONSTRATIONS_AT_ONCE)
        likelihood = measure_likelihood(sampler.policy, demonstrations, limits=limits)
    return Measured(sampler.prompts, sampled, greedy, likelihood, sampler.codec)


def share_a_tokenizer(job: StageJob[PolicyEvaluation]) -> bool:
    """Return whether both models read the same ids."""
    candidate, baseline = (tokenizer_digest(job.inputs[role]) for role in ROLES)
    return candidate == baseline


def logprobs_of(job: StageJob[PolicyEvaluation], sampler: Sampler, sequences: Sequences) -> Tensor:
    """Return log-probabilities (B,T) of the responses' tokens at the sampling temperature."""

    def compute(micro: Sequences) -> dict[str, Tensor]:
        found: dict[str, Tensor] = sampler.policy(micro, temperature=job.generation.temperature)
        return found

    of_tokens = per_token(compute, sequences, limits=sampler.limits, computes="computing log-probabilities")
    return of_tokens["logprobs"]


def refuse_different_prompts(
    job: StageJob[PolicyEvaluation], candidate: Measured, baseline: Measured
) -> None:
    """Raise TokenizersDiffer if the two models did not answer the same prompts, or read the same demonstrations."""
    work, limit = job.work, job.generation.max_prompt_tokens
    read = [None if each.likelihood is None else len(each.likelihood.nll) for each in (candidate, baseline)]
    if list(candidate.prompts.texts) != list(baseline.prompts.texts) or read[0] != read[1]:
        raise TokenizersDiffer(
            f"candidate={work.candidate!r} and baseline={work.baseline!r} do not fit the same prompts into "
            f"generation.max_prompt_tokens={limit}; raise it"
        )


def kl_to_baseline(candidate: Measured, logprobs: dict[str, Tensor]) -> Estimates:
    """Return the KL of the candidate to the baseline; undefined if they have different tokenizers."""
    sampled = candidate.sampled.sampled
    if logprobs:
        return divergence(sampled, logprobs["candidate"], logprobs["baseline"])
    return undefined(("kl_to_baseline", "kl_to_baseline_per_token"), sampled.prompts)


def perplexities(candidate: Measured, baseline: Measured, *, is_comparable: bool) -> Estimates:
    """Return perplexities on the demonstrations, if any, and their ratio if both models read the same tokens."""
    if candidate.likelihood is None or baseline.likelihood is None:
        return {}
    estimates = compare_likelihoods(candidate.likelihood, baseline.likelihood)
    if not is_comparable:
        estimates |= undefined(["perplexity_ratio"], candidate.likelihood.clusters.tolist())
    return estimates


def reward_spread(pairs: Pairs) -> float:
    """Return the difference of the highest and the lowest judgement by the first judge; 0 where all are equal."""
    judgements = torch.cat(
        [next(iter(each.judgements.values())) for each in (pairs.candidate, pairs.baseline)]
    )
    return (judgements.max() - judgements.min()).item()


def refuse_other_tokenizer_of_critic(job: StageJob[PolicyEvaluation]) -> None:
    """Raise TokenizersDiffer if the critic would read other ids than a policy wrote."""
    if "critic" not in job.inputs:
        return
    critic = tokenizer_digest(job.inputs["critic"])
    for role in ROLES:
        if tokenizer_digest(job.inputs[role]) != critic:
            raise TokenizersDiffer(
                f"critic={job.work.critic!r} has another tokenizer than {role}={getattr(job.work, role)!r}, whose tokens it would "
                "read; leave critic out"
            )


def read_by_token(
    job: StageJob[PolicyEvaluation], measured: dict[str, Measured], samples: Sequence[dict[str, object]]
) -> dict[str, ByToken]:
    """Return both models' responses to the first samples, with the critic's values of their tokens if the stage names a
    critic."""
    first = {role: first_responses(samples, of.sampled.sampled) for role, of in measured.items()}
    expected: dict[str, Tensor] = {}
    if "critic" in job.inputs:
        files = job.model("critic")
        critic = placed(
            lambda: load_scalar(files, role="value", training="nothing"),
            files,
            training_device(),
            precision=job.work.arithmetic,
        )
        expected = {role: values_of_tokens(job, critic, of.sequences) for role, of in first.items()}
    return {
        role: ByToken(measured[role].codec.tokenizer, of, expected.get(role)) for role, of in first.items()
    }


def values_of_tokens(job: StageJob[PolicyEvaluation], critic: ScalarModel, sequences: Sequences) -> Tensor:
    """Return values (B,T) of the prefixes that chose each token."""
    found = per_token(
        lambda micro: {"values": values(critic, micro)},
        sequences,
        limits=job.work.pass_limits,
        computes="computing values",
    )
    return found["values"]


def response_rows(judged: Judged) -> list[dict[str, object]]:
    """Return every response as a row of Parquet; ``judgement`` is by ``judge``, and ``also`` has its own column."""
    sampled = judged.sampled
    columns = dict(zip(("judgement", "also_judgement"), judged.judgements.values(), strict=False))
    return [
        {
            "prompt": sampled.prompts[row],
            "response": sampled.responses[row],
            "ended": bool(sampled.ended[row]),
            **{column: judgements[row].item() for column, judgements in columns.items()},
        }
        for row in range(len(sampled.prompts))
    ]


def shown(pairs: Pairs) -> tuple[dict[str, object], ...]:
    """Return both models' first responses to some prompts, each prompt once, whichever model did better.

    The first prompts with different responses are chosen; if these are too few, then the first of the others.
    """
    candidate, baseline = pairs.candidate.sampled, pairs.baseline.sampled
    prompts = candidate.prompts
    rows = [prompts.index(prompt) for prompt in dict.fromkeys(prompts)]
    rows = sorted(rows, key=lambda row: candidate.responses[row] == baseline.responses[row])[:NUM_SHOWN]
    sides = {"baseline": pairs.baseline, "candidate": pairs.candidate}
    return tuple(
        {
            "prompt": prompts[row],
            **{
                key: value
                for side, judged in sides.items()
                for key, value in (
                    (side, judged.sampled.responses[row]),
                    (f"{side}_judgement", next(iter(judged.judgements.values()))[row].item()),
                )
            },
        }
        for row in rows
    )
