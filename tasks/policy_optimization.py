"""Policy optimisation by the recipe's switches, from a plain policy gradient to VAPO.

One iteration, top to bottom: sample, score, shape, estimate advantages, update, adapt the KL coefficients.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

from vantage.models.folders import tokenizer_digest
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import read_prompts
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.rollout.monitors import load_monitors
from vantage.tasks.rollout.selection import Measured, Selection, kept_by
from vantage.tasks.rollout.watching import load_watching
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.measured import uncertainty_of, values_of
from vantage.tasks.training.networks import write_policy
from vantage.tasks.training.optimization import training_device
from vantage.tasks.training.seeds import stage_seed
from vantage.tasks.updates.actor_critic import load_actor_critic
from vantage.tasks.updates.estimates import Estimates
from vantage.tasks.updates.gathering import (
    Gathered,
    Source,
    begin_next,
    describe,
    estimated_anew,
    gather,
    load_source,
)
from vantage.tasks.updates.policy_state import (
    PolicyState,
    coefficients,
    initial_state,
    with_updated_entropy_coef,
    with_updated_kl_coefs,
)
from vantage.tasks.updates.policy_update import Ptx, kl_to_old, read_ptx, update

log = logging.getLogger(__name__)


def run(job: StageJob[ResolvedPolicyOptimization]) -> StageResult:
    """Optimise ``init`` against ``reward`` on ``prompts``; the artifact is the best policy by validation score."""
    # 1. Load the trained networks, the reference, the reward, and the prompts
    networks = load_actor_critic(job, training_device())
    codec = networks.models.codec
    train, validation, test = (read_prompts(job.inputs["prompts"], split, codec) for split in SPLITS)
    watching = load_watching(job, validation, codec, device=networks.models.policy.device)
    networks, job = networks.ready(job, train)
    work, algorithm, models = job.work, job.work.algorithm, networks.models
    encoding = encoding_metrics(job, "prompts", [train, validation, test])
    ptx = read_ptx(job, codec)
    source = load_source(job, networks, train)
    selection = Selection(
        models,
        validation,
        num_samples=work.validation_samples,
        seed=stage_seed(job),
        watching=watching and watching.within(work.pass_limits),
        keeps_by_watch=work.keeps_by_watch,
        monitors=load_monitors(job, models, judge=None if watching is None else watching.scorer),
    )

    with (
        Attempt(
            job,
            total=work.iterations,
            modules=networks.modules | source.moving,
            optimizers=networks.optimizers,
            state=initial_state(job),
            keeps_best=True,
            ahead=models.engine,
        ) as attempt,
        models.sampling(),
    ):
        if not attempt.best:
            selection.keep_if_best(attempt, iteration=0)
        for iteration in attempt.remaining():
            # 2. Sample responses, and compute their rewards and the estimates for the update
            state = attempt.state
            policy_learns = iteration >= algorithm.policy_starts_at and not attempt.policy_is_frozen
            with attempt.unmoved():
                gathered = gather(source, state, has_moved=iteration > algorithm.policy_starts_at)
            begin_next(source, gathered, state, iteration=iteration)
            log_critic(gathered.estimates, algorithm, was_used=state.critic_is_used)

            # 3. Update: policy and critic in the same steps, or the critic first
            gathered, metrics = learn_from(
                source, gathered, state, iteration=iteration, policy_learns=policy_learns, ptx=ptx
            )
            metrics |= describe(gathered, algorithm, state) | counted(source, gathered)

            # 4. Update the coefficients of KL and entropy, and the baselines that follow the policy
            if policy_learns:
                state = steered(source, gathered, state)
                state = with_updated_entropy_coef(state, metrics.get("entropy"), algorithm)
            models.sync_engine()  # this wakes a vLLM in this process, so it comes after the update's passes
            attempt.state = after_rollout(state, gathered)

            # 5. Keep the policy that scores best on validation prompts
            if any(map(attempt.is_due, work.validations)):
                metrics |= selection.keep_if_best(attempt, iteration=iteration + 1)
            num_tokens = int(gathered.rollout.sequences.attention_mask.sum())
            attempt.finish_step(metrics, num_tokens=num_tokens, headline="score_mean")
        selection.put_back_best(attempt)

    # 6. Measure the best policy
    measured = selection.measure(test, num_samples=work.test_samples or work.validation_samples)
    return result_of(source, measured, attempt, encoding=encoding)


def learn_from(
    source: Source,
    gathered: Gathered,
    state: PolicyState,
    *,
    iteration: int,
    policy_learns: bool,
    ptx: Ptx | None,
) -> tuple[Gathered, dict[str, float]]:
    """Update the networks; returns the metrics, and the rollout with the estimates that the policy learned from."""
    job, algorithm = source.job, source.job.work.algorithm
    learn = partial(
        update,
        source.networks,
        gathered.rollout,
        job=job,
        iteration=iteration,
        coefs=coefficients(state, algorithm),
        ptx=ptx,
    )
    if policy_learns and not algorithm.critic_first:
        return gathered, learn(gathered.estimates)
    metrics = learn(gathered.estimates, learning=("critic",))
    if policy_learns:
        gathered = estimated_anew(source, gathered, state)
        metrics |= learn(gathered.estimates, learning=("policy",))
    return gathered, metrics


def result_of(
    source: Source, measured: Measured, attempt: Attempt[PolicyState], *, encoding: Mapping[str, float]
) -> StageResult:
    """Write the kept policy, and which prompts were too easy or impossible.

    Its metrics are those of its responses and of the iterations that led to it.
    """
    job, networks, difficulty = source.job, source.networks, source.difficulty
    written = write_policy(job, networks.policy.causal_lm, networks.models.codec.tokenizer)
    if difficulty is not None:
        difficulty.write(job.output)
    return StageResult(
        metrics={
            **headline_metrics(measured, attempt, job.work),
            **encoding,
            **({} if difficulty is None else difficulty.metrics()),
        },
        uncertainty=uncertainty_of(measured.estimates),
        tokenizer_digest=tokenizer_digest(job.output),
        base=written.base,
        same_as_base=written.same_as_base,
    )


def counted(source: Source, gathered: Gathered) -> dict[str, float]:
    """Count the prompts that were too easy or impossible; returns their numbers so far, if the recipe asks for them."""
    if source.difficulty is None:
        return {}
    source.difficulty.count(gathered.seen)
    return source.difficulty.metrics()


def steered(source: Source, gathered: Gathered, state: PolicyState) -> PolicyState:
    """Return the state with the coefficients for the next rollout; the baselines that follow the policy learn from it."""
    networks, rollout, work = source.networks, gathered.rollout, source.job.work
    measure_kl = cache(partial(kl_to_old, networks, rollout, gathered.estimates, work))
    state = with_updated_kl_coefs(state, rollout, measure_kl, work.algorithm)
    if source.baselines and source.baselines.moves:
        source.baselines.learn(rollout.sampled, rollout.scaled_scores, kl=measure_kl())
    return state


def after_rollout(state: PolicyState, gathered: Gathered) -> PolicyState:
    """Return the state after a rollout, whether or not the update learns from it."""
    weight = gathered.estimates.critic_weight
    return replace(
        state,
        batches=state.batches + gathered.filled.rounds,
        moments=gathered.moments,
        critic_is_used=weight > 0,
        critic_weight_sum=state.critic_weight_sum + weight,
    )


def log_critic(estimates: Estimates, algorithm: Algorithm, *, was_used: bool) -> None:
    """Log that the critic is left out from this iteration on, or counts again."""
    is_used = estimates.critic_weight > 0
    if algorithm.weighs_critic and is_used != was_used:
        then = "counts again" if is_used else "is left out: advantages are returns less their mean"
        log.info("explained variance %.3g: the critic %s", estimates.explained_variance, then)


def headline_metrics(
    measured: Measured, attempt: Attempt[PolicyState], work: ResolvedPolicyOptimization
) -> dict[str, float | None]:
    """Return the metrics of the kept policy, and of the iterations that led to it."""
    state = attempt.state
    return {
        **values_of(measured.estimates),
        "reward_spread": measured.reward_spread,
        **kept_by(state, keeps_by_watch=work.keeps_by_watch),
        "best_iteration": state.best_iteration,
        **mean_critic_weight(attempt, work),
    }


def mean_critic_weight(attempt: Attempt[PolicyState], work: ResolvedPolicyOptimization) -> dict[str, float]:
    """Return the mean weight of the critic in the advantages of all iterations, if it can vary."""
    if not work.algorithm.weighs_critic:
        return {}
    return {"critic_weight_mean": attempt.state.critic_weight_sum / attempt.length}
