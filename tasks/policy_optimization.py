"""Policy optimisation: whatever the recipe's switches describe, from a plain policy gradient to VAPO.

One iteration, top to bottom: sample, score, shape, estimate advantages, update, adapt the KL coefficients.
"""

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial

from torch import Tensor

from vantage.algorithms.importance import ImportanceWeights, truncated_importance_weights
from vantage.algorithms.rewards import RunningMoments
from vantage.models.folders import tokenizer_digest
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import (
    Codec,
    Prompts,
    read_completions,
    read_prompts,
)
from vantage.tasks.data.splits import SPLITS, TRAIN
from vantage.tasks.rewards.verifier_file import VerifierFunction
from vantage.tasks.rewards.verifiers import load_verifier
from vantage.tasks.rollout.ahead import AheadEngine
from vantage.tasks.rollout.group_sampling import Filled, fill, uniform_groups
from vantage.tasks.rollout.reward_moments import read_moments
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import (
    Rollout,
    Scored,
    prompts_of_iteration,
    sample_and_score,
    scale,
    sequence_sums,
    shape,
)
from vantage.tasks.rollout.sampler_check import compare_with_sampler
from vantage.tasks.rollout.selection import Measured, Selection
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.data_order import DataOrder
from vantage.tasks.training.found_limits import found_limits, within_memory
from vantage.tasks.training.measured import uncertainty_of, values_of
from vantage.tasks.training.networks import put_back, write_policy
from vantage.tasks.training.optimization import training_device
from vantage.tasks.training.seeds import derive_seed, stage_seed
from vantage.tasks.updates.actor_critic import ActorCritic, critic_folder, load_actor_critic, taken_by
from vantage.tasks.updates.estimates import Estimates, estimate
from vantage.tasks.updates.policy_state import PolicyState, with_updated_kl_coefs
from vantage.tasks.updates.policy_update import Ptx, kl_to_old, update
from vantage.tasks.updates.prompt_baselines import PromptBaselines, load_baselines

log = logging.getLogger(__name__)


def run(job: StageJob[ResolvedPolicyOptimization]) -> StageResult:
    """Optimise ``init`` against ``reward`` on ``prompts``; the artifact is the best policy by validation score."""
    work = job.work
    algorithm = work.algorithm

    # 1. What is trained, the reference, the reward, and the prompts
    networks = load_actor_critic(job, training_device())
    codec, causal_lm = networks.models.codec, networks.policy.causal_lm
    train, validation, test = (read_prompts(job.inputs["prompts"], split, codec) for split in SPLITS)
    found = found_limits(job, taken_by(networks, train, job), device=networks.policy.device)
    networks, job = networks.within(found, job), within_memory(job, found)
    models, work = networks.models, job.work
    encoding = encoding_metrics(job, "prompts", [train, validation, test])
    ptx = read_ptx(job, codec)
    positive_verifier = load_positive_verifier(job, algorithm)
    baselines = load_baselines(job, models)
    engine = AheadEngine(models) if work.rollout.ahead else None
    sampling = models if engine is None else replace(models, engine=engine)
    # validation too is sampled beside a thread that samples
    selection = Selection(sampling, validation, num_samples=work.validation_samples, seed=stage_seed(job))

    with (
        Attempt(
            job,
            total=work.iterations,
            modules=networks.modules | ({"baselines": baselines} if baselines and baselines.moves else {}),
            optimizers=networks.optimizers,
            state=initial_state(job, algorithm),
            keeps_best=True,
            carries=engine is not None,
        ) as attempt,
        engine or nullcontext(),
    ):
        models.sync_engine()  # an earlier attempt may have left other weights
        if engine is not None and attempt.carried:
            engine.restore(attempt.carried)
        if not attempt.best:
            selection.keep_if_best(attempt, iteration=0)
        for iteration in attempt.remaining():
            # 2. Responses, their rewards, and what the update learns from them
            state = attempt.state
            with attempt.unmoved():
                gathered = gather(
                    job,
                    replace(networks, models=sampling),
                    train,
                    state,
                    positive_verifier,
                    baselines,
                    has_moved=iteration > algorithm.policy_starts_at,
                )
            rollout, estimates = gathered.rollout, gathered.estimates
            if engine is not None and iteration + 1 < work.iterations:
                following = batch_of(job, train, state.batches + gathered.filled.rounds)
                engine.begin(
                    [train.ids[index] for index in following.indices],
                    count=algorithm.samples_per_prompt,
                    seed=following.seed,
                )
            tell_of_critic(estimates, algorithm, was_used=state.critic_is_used)

            # 3. Update: policy and critic in the same steps, or the critic first
            policy_learns = iteration >= algorithm.policy_starts_at
            learn = partial(
                update,
                networks,
                rollout,
                job=job,
                iteration=iteration,
                kl_penalty_coef=state.kl_penalty_coef,
                ptx=ptx,
            )
            if policy_learns and not algorithm.critic_first:
                metrics = learn(estimates)
            else:
                metrics = learn(estimates, learning=("critic",))
                if policy_learns:
                    gathered = estimated_anew(job, networks, gathered, state, positive_verifier)
                    metrics |= learn(gathered.estimates, learning=("policy",))
            models.sync_engine()
            metrics |= describe(gathered, algorithm, state)

            # 4. Update the KL coefficients, and the baselines that follow the policy
            if policy_learns:
                measure_kl = cache(partial(kl_to_old, networks, rollout, estimates, work))
                state = with_updated_kl_coefs(state, rollout, measure_kl, algorithm)
                if baselines and baselines.moves:
                    baselines.learn(rollout.sampled, rollout.scaled_scores, kl=measure_kl())
            attempt.state = after_rollout(state, gathered)

            # 5. Keep the policy that scores best on validation prompts
            if (iteration + 1) % work.validate_every == 0 or iteration + 1 == work.iterations:
                metrics |= selection.keep_if_best(attempt, iteration=iteration + 1)
            if engine is not None:
                attempt.carried = engine.tensors()
            attempt.finish_step(
                metrics, num_tokens=int(rollout.sequences.attention_mask.sum()), headline="score_mean"
            )
        put_back(causal_lm, attempt.best)
        models.sync_engine()

    # 6. What the best policy is like
    alone = replace(selection, models=models)
    measured = alone.measure(test, num_samples=work.test_samples or work.validation_samples)
    written = write_policy(job, causal_lm, codec.tokenizer)
    return StageResult(
        metrics={**headline_metrics(measured, attempt.state, work), **encoding},
        uncertainty=uncertainty_of(measured.estimates),
        tokenizer_digest=tokenizer_digest(job.output),
        base=written.base,
        same_as_base=written.same_as_base,
    )


@dataclass(frozen=True)
class Gathered:
    """What one iteration learns from; nothing that is saved has moved for it."""

    filled: Filled
    moments: RunningMoments
    """Of the reward, this rollout's scores among them."""
    rollout: Rollout
    greedy: Scored | None
    """Greedy responses to the same prompts, where they are the baseline."""
    prompt_baselines: Tensor | None
    """(B,): of the responses' prompts, where they come from collected responses."""
    estimates: Estimates
    gap: dict[str, float]
    """Between the policy's log-probabilities and the sampler's."""


def gather(
    job: StageJob[ResolvedPolicyOptimization],
    networks: ActorCritic,
    prompts: Prompts,
    state: PolicyState,
    positive_verifier: VerifierFunction | None,
    baselines: PromptBaselines | None,
    *,
    has_moved: bool,
) -> Gathered:
    """Sample and score responses, shape their rewards, and estimate advantages and the critic's targets.

    Args:
        has_moved: whether the policy learned in the iteration before.

    Raises:
        SamplerDisagrees: the policy is not, token by token, the one that sampled.
    """
    work = job.work
    algorithm, models = work.algorithm, networks.models
    has_value_head = networks.policy.value_head is not None
    filled = sample_rollout(job, models, prompts, first_batch=state.batches)
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
    is_stale = has_moved and isinstance(models.engine, AheadEngine) and models.engine.took_begun
    if work.rollout.ahead and algorithm.old_logprobs == "policy":
        rollout = replace(rollout, importance=importance_of(rollout, cap=work.rollout.importance_cap))
    elif is_stale:
        rollout = replace(rollout, is_one_step_old=True)
    gap = {}
    if algorithm.old_logprobs == "policy" and not is_stale:  # else the first step's ratio tells it
        gap = compare_with_sampler(rollout.logprobs, rollout.sampled, precision=work.precision)
    greedy = sample_greedy(work, models, prompts, filled.scored)
    greedy_scores = scaled_greedy(greedy, algorithm, moments, job)
    of_prompts = None if baselines is None else baselines.of(rollout.sampled, moments)
    estimates = estimates_now(
        networks,
        rollout,
        algorithm,
        state,
        positive_verifier,
        greedy_scores=greedy_scores,
        prompt_baselines=of_prompts,
    )
    return Gathered(filled, moments, rollout, greedy, of_prompts, estimates, gap)


def estimated_anew(
    job: StageJob[ResolvedPolicyOptimization],
    networks: ActorCritic,
    gathered: Gathered,
    state: PolicyState,
    positive_verifier: VerifierFunction | None,
) -> Gathered:
    """The same rollout with advantages from the critic's values as they are now; its weight was measured before it learned."""
    before = gathered.estimates
    now = estimates_now(
        networks,
        gathered.rollout,
        job.work.algorithm,
        state,
        positive_verifier,
        critic_weight=before.critic_weight,
    )
    return replace(gathered, estimates=replace(now, explained_variance=before.explained_variance))


def estimates_now(
    networks: ActorCritic,
    rollout: Rollout,
    algorithm: Algorithm,
    state: PolicyState,
    positive_verifier: VerifierFunction | None,
    *,
    greedy_scores: Tensor | None = None,
    prompt_baselines: Tensor | None = None,
    critic_weight: float | None = None,
) -> Estimates:
    """What the updates learn from, by the critic's values as they are now; ``critic_weight``: None: by them too."""
    old_values, final_values = (
        networks.values_and_final(rollout)
        if algorithm.bootstrap_truncated
        else (networks.values(rollout), None)
    )
    return estimate(
        rollout,
        algorithm,
        old_values=old_values,
        final_values=final_values,
        greedy_scores=greedy_scores,
        prompt_baselines=prompt_baselines,
        critic_was_used=state.critic_is_used,
        weight=critic_weight,
        positive_verifier=positive_verifier,
    )


def tell_of_critic(estimates: Estimates, algorithm: Algorithm, *, was_used: bool) -> None:
    """Log that the critic is left out from this iteration on, or counts again."""
    is_used = estimates.critic_weight > 0
    if algorithm.weighs_critic and is_used != was_used:
        then = "counts again" if is_used else "is left out: advantages are returns less their mean"
        log.info("explained variance %.3g: the critic %s", estimates.explained_variance, then)


def headline_metrics(
    measured: Measured, state: PolicyState, work: ResolvedPolicyOptimization
) -> dict[str, float | None]:
    """Of the kept policy, and of the iterations that led to it."""
    return {
        **values_of(measured.estimates),
        "reward_spread": measured.reward_spread,
        "validation_score": state.best,
        "best_iteration": state.best_iteration,
        **mean_critic_weight(state, work),
    }


def mean_critic_weight(state: PolicyState, work: ResolvedPolicyOptimization) -> dict[str, float]:
    """How far the advantages of all iterations were the critic's, where that can vary."""
    if not work.algorithm.weighs_critic:
        return {}
    return {"critic_weight_mean": state.critic_weight_sum / work.iterations}


def initial_state(job: StageJob, algorithm: Algorithm) -> PolicyState:
    """The state before the first iteration; running moments come with the critic that was pretrained with them."""
    critic = critic_folder(job) if algorithm.reads_critic else None
    return PolicyState(
        kl_coef=algorithm.kl_coef,
        kl_penalty_coef=algorithm.kl_penalty_coef,
        moments=read_moments(critic),
    )


def read_ptx(job: StageJob[ResolvedPolicyOptimization], codec: Codec) -> Ptx | None:
    """The demonstrations whose NLL is added to the policy's loss, if any is."""
    work = job.work
    if not work.algorithm.ptx_coef:
        return None
    examples = read_completions(job.inputs["ptx"], TRAIN, ["response"], codec)
    order = DataOrder(
        num_examples=len(examples), batch_size=work.minibatch_size, seed=derive_seed(stage_seed(job), "ptx")
    )
    return Ptx(examples, order)


def load_positive_verifier(job: StageJob, algorithm: Algorithm) -> VerifierFunction | None:
    """What says which responses are imitated, where that is a verifier."""
    if not algorithm.positive_nll_coef or algorithm.positive_verifier is None:
        return None
    return load_verifier(job, algorithm.positive_verifier, role="positive_verifier")


@dataclass(frozen=True)
class Batch:
    """Prompts that are sampled together, a whole rollout's worth."""

    indices: list[int]
    """Of the training split."""
    seed: int
    """Of their responses."""


def batch_of(job: StageJob[ResolvedPolicyOptimization], prompts: Prompts, number: int) -> Batch:
    """A pure function of the number, counted over the whole stage."""
    work, seed = job.work, stage_seed(job)
    indices = prompts_of_iteration(
        number,
        num_responses=work.batch_size,
        samples_per_prompt=work.algorithm.samples_per_prompt,
        num_prompts=len(prompts),
        seed=seed,
    )
    return Batch(indices, seed=derive_seed(seed, "sampling", number))


def importance_of(rollout: Rollout, *, cap: float) -> ImportanceWeights:
    """The weights of the rollout's tokens, which the policy drew as it is now or as it was before its last update."""
    return truncated_importance_weights(
        rollout.logprobs, rollout.sampled.sampler_logprobs, rollout.sequences.response_mask, cap=cap
    )


def sample_rollout(
    job: StageJob[ResolvedPolicyOptimization], models: RolloutModels, prompts: Prompts, *, first_batch: int
) -> Filled:
    """One iteration's scored responses; the batches of prompts, and their random numbers, count on from ``first_batch``."""
    work = job.work
    group = work.algorithm.samples_per_prompt

    def draw(number: int) -> Scored:
        batch = batch_of(job, prompts, first_batch + number)
        return sample_and_score(models, prompts, batch.indices, count=group, seed=batch.seed)

    if work.algorithm.drop_uniform_groups:
        return fill(
            draw,
            samples_per_prompt=group,
            max_rounds=work.algorithm.max_sampling_rounds,
            pad_token_id=models.codec.pad_token_id,
        )
    scored = draw(0)
    uniform = uniform_groups(scored.scores.weighted_sum, samples_per_prompt=group)
    return Filled(scored=scored, rounds=1, uniform_share=uniform.float().mean().item())


def sample_greedy(
    work: ResolvedPolicyOptimization, models: RolloutModels, prompts: Prompts, scored: Scored
) -> Scored | None:
    """The likeliest response to the prompt of each response, scored; None where no baseline is made of them."""
    if work.algorithm.advantage != "greedy_baseline":
        return None
    # Demonstrations may have one prompt in several rows, with an answer of its own in each
    index_of = {case: index for index, case in enumerate(zip(prompts.texts, prompts.answers, strict=True))}
    cases = list(zip(scored.sampled.prompts, scored.sampled.answers, strict=True))
    distinct = list(dict.fromkeys(cases))
    greedy = sample_and_score(models, prompts, [index_of[case] for case in distinct], seed=0, greedy=True)
    row = {case: number for number, case in enumerate(distinct)}
    return greedy.select([row[case] for case in cases])


def scaled_greedy(
    greedy: Scored | None, algorithm: Algorithm, moments: RunningMoments, job: StageJob
) -> Tensor | None:
    """The greedy responses' scores (B,), scaled as the sampled ones are."""
    if greedy is None:
        return None
    return scale(greedy, algorithm, moments, max_length=job.generation.max_response_tokens)


def updated_moments(before: RunningMoments, scored: Scored, algorithm: Algorithm) -> RunningMoments:
    """The moments of all scores so far, a rollout's included before it is scaled by them."""
    return before if algorithm.reward_scaling == "none" else before.update(scored.scores.total)


def after_rollout(state: PolicyState, gathered: Gathered) -> PolicyState:
    """What a rollout moves, whatever is learned from it."""
    weight = gathered.estimates.critic_weight
    return replace(
        state,
        batches=state.batches + gathered.filled.rounds,
        moments=gathered.moments,
        critic_is_used=weight > 0,
        critic_weight_sum=state.critic_weight_sum + weight,
    )


def describe(gathered: Gathered, algorithm: Algorithm, state: PolicyState) -> dict[str, float]:
    """What a rollout was like, before its updates, and the coefficients of its rewards."""
    rollout, estimates, filled = gathered.rollout, gathered.estimates, gathered.filled
    mask = rollout.sequences.response_mask
    advantages = estimates.advantages[estimates.policy_mask]
    terms = {f"score_mean_{name}": term.mean().item() for name, term in rollout.scores.by_term.items()}
    metrics = {
        "score_mean": rollout.scores.total.mean().item(),
        **terms,
        "scaled_score_mean": rollout.scaled_scores.mean().item(),
        "reward_mean": sequence_sums(rollout.rewards, mask).mean().item(),
        "kl_to_reference": sequence_sums(rollout.log_ratios, mask).mean().item(),
        "kl_coef": state.kl_coef,
        "advantage_mean": advantages.mean().item(),
        "advantage_std": advantages.std(correction=0).item(),
        "positive_share": estimates.is_positive.float().mean().item(),
        "response_length_mean": rollout.sequences.lengths.float().mean().item(),
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
    if gathered.prompt_baselines is not None:
        metrics["baseline_mean"] = gathered.prompt_baselines.mean().item()
    if estimates.explained_variance is not None:
        metrics["explained_variance"] = estimates.explained_variance
    if algorithm.weighs_critic:
        metrics["critic_weight"] = estimates.critic_weight
    if algorithm.reward_scaling != "none":
        moments = gathered.moments
        metrics |= {"reward_moments_mean": moments.mean, "reward_moments_std": moments.std}
    if algorithm.kl_penalty_coef:
        metrics["kl_penalty_coef"] = state.kl_penalty_coef
    return metrics
