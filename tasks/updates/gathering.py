"""Gather the responses, shaped rewards and advantages from which one iteration of policy optimisation learns."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vantage.algorithms.ensembles import disagreement
from vantage.algorithms.importance import ImportanceWeights, importance_weights
from vantage.algorithms.rewards import RunningMoments
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.recipe.rollout_correction import RolloutCorrection
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Prompts
from vantage.tasks.rewards.scoring import score_metrics
from vantage.tasks.rewards.verifier_file import VerifierFunction
from vantage.tasks.rewards.verifiers import load_deciding_verifier
from vantage.tasks.rollout.group_sampling import Filled, fill, groups_without_contrast
from vantage.tasks.rollout.response_shape import response_shape
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import (
    Rollout,
    Scored,
    begin_sampling,
    prompts_of_iteration,
    sample_and_score,
    scale,
    sequence_sums,
    shape,
)
from vantage.tasks.rollout.sampler_check import compare_with_sampler, gap_to_sampler
from vantage.tasks.training.seeds import derive_seed, stage_seed
from vantage.tasks.updates.actor_critic import ActorCritic
from vantage.tasks.updates.estimates import Estimates, estimate
from vantage.tasks.updates.policy_state import PolicyState, coefficients
from vantage.tasks.updates.prompt_baselines import PromptBaselines, load_baselines
from vantage.tasks.updates.prompt_difficulty import PromptDifficulty, Seen, load_difficulty, seen_groups


@dataclass(frozen=True)
class Source:
    """Models and prompts from which responses are sampled and judged; each iteration is a pure function of the state and
    the weights."""

    job: StageJob[ResolvedPolicyOptimization]
    networks: ActorCritic
    prompts: Prompts
    """Prompts of the training split."""
    positive_verifier: VerifierFunction | None
    """Verifier that decides which responses are imitated, if a verifier decides it."""
    baselines: PromptBaselines | None
    """Baselines of prompts, if they come from collected responses."""
    difficulty: PromptDifficulty | None = None
    """Counts of the prompts' passes, if the recipe asks for them."""

    @property
    def moving(self) -> dict[str, nn.Module]:
        """Return the modules that change during the stage, by their names in checkpoints."""
        moving: dict[str, nn.Module] = {}
        if self.baselines and self.baselines.moves:
            moving["baselines"] = self.baselines
        return moving if self.difficulty is None else {**moving, "difficulty": self.difficulty}


def load_source(job: StageJob[ResolvedPolicyOptimization], networks: ActorCritic, prompts: Prompts) -> Source:
    """Load the models and data that the recipe names beside the networks."""
    scorer = networks.models.scorer
    assert scorer is not None  # a stage that samples responses has a scorer
    return Source(
        job,
        networks,
        prompts,
        positive_verifier=load_positive_verifier(job, job.work.algorithm),
        baselines=load_baselines(job, networks.models),
        difficulty=load_difficulty(job, prompts, score_names=scorer.score_names),
    )


@dataclass(frozen=True)
class Gathered:
    """Everything from which one iteration learns; gathering it changes no saved state."""

    filled: Filled
    moments: RunningMoments
    """Moments of the reward's scores, including this rollout's."""
    rollout: Rollout
    greedy: Scored | None
    """Greedy responses to the same prompts, if they are the baseline."""
    prompt_baselines: Tensor | None
    """(B,): baselines of the responses' prompts, if they come from collected responses."""
    estimates: Estimates
    gap: dict[str, float]
    """Difference between the policy's log-probabilities and the sampler's."""
    members: tuple[str, ...] = ()
    """The reward's terms that an ensemble combines."""
    seen: tuple[Seen, ...] = ()
    """Groups that were sampled, if the passes of prompts are counted."""


def gather(source: Source, state: PolicyState, *, has_moved: bool) -> Gathered:
    """Sample and score responses, shape their rewards, and estimate advantages and the critic's targets.

    Args:
        has_moved: whether the policy learned in the previous iteration.

    Raises:
        SamplerDisagrees: the policy differs, token by token, from the one from which the responses were sampled.
    """
    job, networks, baselines = source.job, source.networks, source.baselines
    work, algorithm, models = job.work, job.work.algorithm, networks.models
    has_value_head = networks.policy.value_head is not None
    seen: list[Seen] = []
    filled = sample_rollout(job, models, source.prompts, first_batch=state.batches, seen=seen)
    moments = updated_moments(state.moments, filled.scored, algorithm)
    rollout = shape(
        models,
        filled.scored,
        returns=algorithm,
        moments=moments,
        kl_coef=state.kl_coef,
        by_sampler=algorithm.old_logprobs == "sampler",
        with_values=has_value_head,
        with_final_values=has_value_head and algorithm.bootstrap_truncated,
    )
    is_stale = has_moved and models.engine.took_begun
    gap: dict[str, float] = {}
    if algorithm.old_logprobs == "policy":
        if work.weighs_by_sampler:
            rollout = replace(rollout, importance=importance_of(rollout, work))
            gap |= gap_to_sampler(rollout.logprobs, rollout.sampled, "importance_gap")
        if not is_stale:  # a gap is expected if the sampling policy is one update older
            gap |= compare_with_sampler(rollout.logprobs, rollout.sampled, precision=work.arithmetic)
    elif is_stale:
        rollout = replace(rollout, is_one_step_old=True)  # the ratio of the first step shows the gap
    greedy = sample_greedy(work, models, source.prompts, filled.scored)
    greedy_scores = scaled_greedy(greedy, algorithm, moments, job)
    of_prompts = None if baselines is None else baselines.of(rollout.sampled, moments)
    estimates = estimates_now(
        source,
        rollout,
        state,
        greedy_scores=greedy_scores,
        prompt_baselines=of_prompts,
    )
    members = () if models.scorer is None else models.scorer.members
    return Gathered(filled, moments, rollout, greedy, of_prompts, estimates, gap, members, tuple(seen))


def estimated_anew(source: Source, gathered: Gathered, state: PolicyState) -> Gathered:
    """Return the same rollout with advantages from the critic's present values; its weight was measured before it learned."""
    before = gathered.estimates
    now = estimates_now(source, gathered.rollout, state, critic_weight=before.critic_weight)
    return replace(gathered, estimates=replace(now, explained_variance=before.explained_variance))


def estimates_now(
    source: Source,
    rollout: Rollout,
    state: PolicyState,
    *,
    greedy_scores: Tensor | None = None,
    prompt_baselines: Tensor | None = None,
    critic_weight: float | None = None,
) -> Estimates:
    """Return estimates from the critic's present values; ``critic_weight`` None: the weight also comes from them."""
    networks, algorithm = source.networks, source.job.work.algorithm
    found = networks.read_critic(rollout, with_final=algorithm.bootstrap_truncated)
    return estimate(
        rollout,
        algorithm,
        old_values=found.values,
        final_values=found.final_values,
        greedy_scores=greedy_scores,
        prompt_baselines=prompt_baselines,
        critic_was_used=state.critic_is_used,
        weight=critic_weight,
        disagreement=found.disagreement,
        positive_verifier=source.positive_verifier,
    )


def begin_next(source: Source, gathered: Gathered, state: PolicyState, *, iteration: int) -> None:
    """Let the engine begin with the responses of the next iteration, if it samples ahead and there is a next iteration."""
    job = source.job
    if not source.networks.models.ahead or iteration + 1 == job.work.iterations:
        return
    following = batch_of(job, source.prompts, state.batches + gathered.filled.rounds)
    begin_sampling(
        source.networks.models,
        source.prompts,
        following.indices,
        count=job.work.algorithm.samples_per_prompt,
        seed=following.seed,
    )


def load_positive_verifier(job: StageJob, algorithm: Algorithm) -> VerifierFunction | None:
    """Return the verifier that decides which responses are imitated; None: no verifier decides it."""
    if not algorithm.positive_nll_coef or algorithm.positive_verifier is None:
        return None
    return load_deciding_verifier(job, algorithm.positive_verifier, role="positive_verifier")


@dataclass(frozen=True)
class Batch:
    """Prompts of one rollout, which are sampled together."""

    indices: list[int]
    """Indices of the prompts in the training split."""
    seed: int
    """Seed of their responses."""


def batch_of(job: StageJob[ResolvedPolicyOptimization], prompts: Prompts, number: int) -> Batch:
    """Return a batch as a pure function of its number, counted over the whole stage."""
    work, seed = job.work, stage_seed(job)
    indices = prompts_of_iteration(
        number,
        num_responses=work.batch_size,
        samples_per_prompt=work.algorithm.samples_per_prompt,
        num_prompts=len(prompts),
        seed=seed,
        easiness=prompts.pass_rates if work.curriculum == "easy_first" else None,
    )
    return Batch(indices, seed=derive_seed(seed, "sampling", number))


def importance_of(rollout: Rollout, work: ResolvedPolicyOptimization) -> ImportanceWeights:
    """Return the weights of the rollout's tokens, which the policy sampled either now or before its last update."""
    correction = work.algorithm.rollout_correction or RolloutCorrection(
        action="truncate", high=work.rollout.importance_cap
    )
    return importance_weights(
        rollout.logprobs,
        rollout.sampled.sampler_logprobs,
        rollout.sequences.response_mask,
        correction=correction.action,
        ratio_of=correction.ratio_of,
        low=correction.low,
        high=correction.high,
    )


def sample_rollout(
    job: StageJob[ResolvedPolicyOptimization],
    models: RolloutModels,
    prompts: Prompts,
    *,
    first_batch: int,
    seen: list[Seen],
) -> Filled:
    """Return one iteration's scored responses; batches of prompts and their random numbers are counted from ``first_batch``.

    ``seen`` gets every group that was sampled, if the passes of prompts are counted.
    """
    work = job.work
    group = work.algorithm.samples_per_prompt

    def draw(number: int) -> Scored:
        batch = batch_of(job, prompts, first_batch + number)
        scored = sample_and_score(models, prompts, batch.indices, count=group, seed=batch.seed)
        if work.difficulty is not None:
            seen.append(seen_groups(scored, work.difficulty, samples_per_prompt=group))
        return scored

    if work.algorithm.drop_uniform_groups:
        return fill(
            draw,
            samples_per_prompt=group,
            max_rounds=work.algorithm.max_sampling_rounds,
            pad_token_id=models.codec.pad_token_id,
            each=work.algorithm.normalise_each_score,
        )
    scored = draw(0)
    uniform = groups_without_contrast(
        scored.scores, samples_per_prompt=group, each=work.algorithm.normalise_each_score
    )
    return Filled(scored=scored, rounds=1, uniform_share=uniform.float().mean().item())


def sample_greedy(
    work: ResolvedPolicyOptimization, models: RolloutModels, prompts: Prompts, scored: Scored
) -> Scored | None:
    """Return the likeliest response to each response's prompt, scored; None if no baseline uses them."""
    if work.algorithm.advantage != "greedy_baseline":
        return None
    # Several rows of demonstrations may have the same prompt with different answers
    index_of = {case: index for index, case in enumerate(zip(prompts.texts, prompts.answers, strict=True))}
    cases = list(zip(scored.sampled.prompts, scored.sampled.answers, strict=True))
    distinct = list(dict.fromkeys(cases))
    greedy = sample_and_score(models, prompts, [index_of[case] for case in distinct], seed=0, greedy=True)
    row = {case: number for number, case in enumerate(distinct)}
    return greedy.select([row[case] for case in cases])


def scaled_greedy(
    greedy: Scored | None, algorithm: Algorithm, moments: RunningMoments, job: StageJob
) -> Tensor | None:
    """Return the greedy responses' scores (B,), scaled like the sampled ones."""
    if greedy is None:
        return None
    return scale(greedy, algorithm, moments, max_length=job.generation.max_response_tokens)


def updated_moments(before: RunningMoments, scored: Scored, algorithm: Algorithm) -> RunningMoments:
    """Return the moments of all scores so far; a rollout is included before its scores are scaled."""
    return before if algorithm.reward_scaling == "none" else before.update(scored.scores.total)


def describe(gathered: Gathered, algorithm: Algorithm, state: PolicyState) -> dict[str, float]:
    """Return metrics of a rollout before its updates, and the coefficients of its rewards."""
    rollout, estimates, filled = gathered.rollout, gathered.estimates, gathered.filled
    mask = rollout.sequences.response_mask
    metrics = {
        **_disagreement(rollout, gathered.members),
        "score_mean": rollout.scores.total.mean().item(),
        **score_metrics(rollout.scores),
        "scaled_score_mean": rollout.scaled_scores.mean().item(),
        "reward_mean": sequence_sums(rollout.rewards, mask).mean().item(),
        **_divergence(sequence_sums(rollout.log_ratios, mask), rollout.sequences.lengths),
        "kl_coef": state.kl_coef,
        **_moments_of(estimates.advantages[estimates.policy_mask]),
        "positive_share": estimates.is_positive.float().mean().item(),
        "response_length_mean": rollout.sequences.lengths.float().mean().item(),
        **response_shape(rollout.sequences),
        **_reference_nll(rollout),
        "truncated_share": (~rollout.sampled.ended).float().mean().item(),
        "uniform_group_share": filled.uniform_share,
        "sampling_rounds": filled.rounds,
        **gathered.gap,
    }
    if gathered.greedy is not None:
        metrics["greedy_score_mean"] = gathered.greedy.scores.total.mean().item()
    if rollout.importance is not None:
        metrics["importance_weight"] = rollout.importance.importance_weight.mean()
        metrics["importance_capped"] = rollout.importance.importance_capped.mean()
        metrics["importance_effective_share"] = rollout.importance.effective_share
    if gathered.prompt_baselines is not None:
        metrics["baseline_mean"] = gathered.prompt_baselines.mean().item()
    if estimates.explained_variance is not None:
        metrics["explained_variance"] = estimates.explained_variance
    if estimates.disagreement is not None:
        metrics["critic_disagreement"] = estimates.disagreement[mask].mean().item()
    if algorithm.weighs_critic:
        metrics["critic_weight"] = estimates.critic_weight
    if algorithm.reward_scaling != "none":
        moments = gathered.moments
        metrics |= {"reward_moments_mean": moments.mean, "reward_moments_std": moments.std}
    if algorithm.kl_penalty_coef:
        metrics["kl_penalty_coef"] = state.kl_penalty_coef
    if algorithm.entropy_target is not None:
        metrics["entropy_coef"] = coefficients(state, algorithm).entropy
    return metrics


def _divergence(log_ratios: Tensor, lengths: Tensor) -> dict[str, float]:
    """Return the KL to the reference of responses with these sums of log-ratios (B,), in nats, and lengths (B,)."""
    divergence = log_ratios.mean().item()
    return {
        "kl_to_reference": divergence,
        "kl_to_reference_per_token": divergence / lengths.float().mean().item(),
    }


def _disagreement(rollout: Rollout, members: tuple[str, ...]) -> dict[str, float]:
    """Return the mean disagreement of an ensemble's models about a response; empty without an ensemble."""
    if not members:
        return {}
    scores = torch.stack([rollout.scores.by_term[name] for name in members])
    return {"reward_disagreement": disagreement(scores).mean().item()}


def _reference_nll(rollout: Rollout) -> dict[str, float]:
    """Return the responses' NLL under the reference (nats per token), if its log-probabilities are known."""
    if rollout.ref_logprobs is None:
        return {}
    mask = rollout.sequences.response_mask
    return {"reference_nll": -sequence_sums(rollout.ref_logprobs, mask).sum().item() / int(mask.sum())}


def _moments_of(advantages: Tensor) -> dict[str, float]:
    """Return mean and deviation of the tokens' advantages (N,); empty if the overlong filter left no token."""
    if not len(advantages):
        return {}
    return {
        "advantage_mean": advantages.mean().item(),
        "advantage_std": advantages.std(correction=0).item(),
    }
