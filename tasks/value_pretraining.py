"""Value pretraining: the critic alone learns Monte-Carlo returns of a fixed policy (VC-PPO, VAPO §4.1).

A reward model scores unfinished text low, so as a critic it sees progress everywhere and rewards the earliest tokens
most. Here it learns what the policy's prefixes are really worth, under the very reward that the policy will see,
before any policy update. The proof is explained variance on prompts that it was not trained on.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from vantage.algorithms.advantages import monte_carlo_returns
from vantage.algorithms.diagnostics import ValueDiagnostics, value_diagnostics
from vantage.algorithms.rewards import RunningMoments
from vantage.algorithms.value_loss import value_loss
from vantage.models.adapters import has_adapters
from vantage.models.folders import tokenizer_digest
from vantage.models.heads import (
    ScalarModel,
    load_critic,
    save_value,
    values,
)
from vantage.schemas.recipe.resolved import ResolvedValuePretraining
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.splits import TEST, VALIDATION
from vantage.tasks.rollout.ahead import AheadEngine
from vantage.tasks.rollout.critic_diagnosis import (
    diagnose_critic,
    diagnosis_metrics,
    uncertainty_of_diagnosis,
    write_diagnosis,
)
from vantage.tasks.rollout.minibatches import OptimizerSteps
from vantage.tasks.rollout.response_source import ResponseSource, load_source
from vantage.tasks.rollout.reward_moments import write_moments
from vantage.tasks.rollout.rollout_models import RolloutModels, load_rollout_models
from vantage.tasks.rollout.rollouts import Rollout, rollout_values, shape
from vantage.tasks.rollout.sampler_check import compare_with_sampler
from vantage.tasks.training import carried_optimizer, progress
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.best_weights import keep_if_best
from vantage.tasks.training.found_limits import Taken, found_limits, longest_response, within_memory
from vantage.tasks.training.measured import defined
from vantage.tasks.training.metric_sums import LossSums, MetricSums
from vantage.tasks.training.networks import fixed_policy, put_back, trained
from vantage.tasks.training.optimization import (
    autocast,
    make_optimizer,
    training_device,
    update_weights,
)
from vantage.tasks.training.passes import passes_of
from vantage.tasks.training.seeds import derive_seed, stage_seed
from vantage.tasks.training.stage_state import BestSoFar

POSITIONS = 4
"""Explained variance is also measured in so many equal parts of the response."""


@dataclass(frozen=True)
class ValueState(BestSoFar):
    """What moves with the checkpoints beside the critic."""

    without_gain: int = 0
    """Validations since the best one."""


@dataclass(frozen=True)
class HeldOut:
    """Responses to held-out prompts, sampled once, with their Monte-Carlo returns (B,T)."""

    rollout: Rollout
    returns: Tensor


def run(job: StageJob[ResolvedValuePretraining]) -> StageResult:
    """Pretrain the critic that starts from ``init`` on responses of ``policy``; the artifact is a value model."""
    work = job.work
    device = training_device()

    # 1. The fixed policy, the policy stage's own reward, and a critic
    policy = fixed_policy(job, "policy", device)
    models = load_rollout_models(
        job,
        work,
        policy,
        role="policy",
        with_reference=bool(work.returns.kl_coef),
        with_scorer=bool(work.fresh_responses),
    )
    codec = models.codec
    head_seed = derive_seed(stage_seed(job), "init")
    critic = trained(
        job,
        lambda training: load_critic(job.model("init"), seed=head_seed, training=training),
        job.inputs["init"],
        device,
    )
    optimizer = make_optimizer(critic, weight_decay=work.weight_decay)
    kept_optimizer = optimizer if work.keep_optimizer else None

    # 2. Where responses come from, and those to validation prompts, to be measured on
    source = load_source(job, models)
    taken = Taken(
        longest_response(source.prompts, job.generation, shares_prompt=work.pass_limits.share_prompts),
        [partial(values, critic)],
        work.precision,
        [optimizer],
        models.sampler and replace(models.sampler, beside_training=bool(work.rollout.ahead)),
    )
    found = found_limits(job, taken, device=device)
    models, job = models.within(found, job), within_memory(job, found)
    source = replace(source, job=job, models=models)
    encoding = encoding_metrics(job, "prompts", [source.prompts])
    moments = score_moments(source)
    held_out = measured_responses(source, moments, VALIDATION)
    engine = AheadEngine(models) if work.rollout.ahead else None
    sampling = models if engine is None else replace(models, engine=engine)

    with (
        Attempt(
            job,
            total=work.iterations,
            modules={"critic": critic},
            optimizers={"critic": optimizer},
            state=ValueState(),
            keeps_best=True,
        ) as attempt,
        engine or nullcontext(),
    ):
        if not attempt.best:
            validate(attempt, critic, kept_optimizer, held_out, models, iteration=0)
        for iteration in attempt.remaining():
            # 3. A rollout of the fixed policy, fresh or collected, and its Monte-Carlo returns
            with attempt.unmoved():
                rollout, gap = training_rollout(source, sampling, moments, iteration)
            if engine is not None and iteration + 1 < work.iterations:
                source.begin(engine, iteration + 1)
            returns = monte_carlo_returns(
                rollout.rewards, rollout.sequences.response_mask, gamma=work.returns.gamma
            )

            # 4. Regress on them, without a value clip: the critic has far to go
            metrics = gap | regress(critic, optimizer, rollout, returns, job, iteration=iteration)

            # 5. Keep the critic that explains unseen prompts best; more steps are not always better
            if (iteration + 1) % work.validate_every == 0 or iteration + 1 == work.iterations:
                metrics |= validate(
                    attempt, critic, kept_optimizer, held_out, models, iteration=iteration + 1
                )
                if attempt.state.without_gain >= work.patience:
                    attempt.stop()
            attempt.finish_step(
                {
                    **metrics,
                    "score_mean": rollout.scores.total.mean().item(),
                    "return_mean": returns[rollout.sequences.response_mask].mean().item(),
                },
                num_tokens=int(rollout.sequences.attention_mask.sum()),
                headline="value_loss",
            )
        put_back(critic, attempt.best)

    # 6. How well it explains prompts that have chosen nothing: the best of several measurements is optimistic
    test = measured_responses(source, moments, TEST)
    base = job.base_digest("init") if has_adapters(critic) else None
    save_value(critic, codec.tokenizer, job.output, base=base)
    if work.keep_optimizer:
        carried_optimizer.write_state(job.output, attempt.best)
    if moments.count:
        write_moments(job.output, moments)
    return result_of(job, critic, test, models, attempt.state, encoding=encoding, base=base)


def result_of(
    job: StageJob[ResolvedValuePretraining],
    critic: ScalarModel,
    test: HeldOut,
    models: RolloutModels,
    state: ValueState,
    *,
    encoding: Mapping[str, float],
    base: str | None,
) -> StageResult:
    """What the kept critic explains of responses to test prompts; its diagnosis is written beside it."""
    measured = diagnose(critic, test, models)
    diagnosis = diagnose_critic(
        predict(critic, test, models),
        test.returns,
        test.rollout.sequences.response_mask,
        test.rollout.sampled.prompts,
        iterations=job.work.iterations,
        best_iteration=state.best_iteration,
    )
    write_diagnosis(job.output, diagnosis)
    return StageResult(
        metrics={
            **diagnosis_metrics(diagnosis),
            **headline_metrics(measured),
            "validation_explained_variance": state.best,
            "best_iteration": state.best_iteration,
            **encoding,
        },
        uncertainty=uncertainty_of_diagnosis(diagnosis),
        tokenizer_digest=tokenizer_digest(job.output),
        base=base,
    )


def score_moments(source: ResponseSource) -> RunningMoments:
    """Moments of the scores of one rollout, by which all returns here are scaled, and which the policy stage takes over.

    They stay as they are for the whole stage: a target that moves with them would not be the return of one policy.
    """
    if source.job.work.returns.reward_scaling == "none":
        return RunningMoments()
    return RunningMoments().update(source.for_moments().scores.total)


def training_rollout(
    source: ResponseSource, sampling: RolloutModels, moments: RunningMoments, iteration: int
) -> tuple[Rollout, dict[str, float]]:
    """The rollout of one iteration, and the gap between the policy and the sampler where it is measured.

    Of a rollout of collected responses alone the policy's log-probabilities are known: the sampler's, which the held-out
    responses of the same collection have shown to be the policy's.

    Raises:
        SamplerDisagrees: the policy's log-probabilities are not those that it sampled with.
    """
    work = source.job.work
    scored = source.for_iteration(iteration, sampling)
    if not work.fresh_responses:
        return shape(source.models, scored, returns=work.returns, moments=moments, by_sampler=True), {}
    rollout = shape(source.models, scored, returns=work.returns, moments=moments)
    return rollout, compare_with_sampler(rollout.logprobs, rollout.sampled, precision=work.precision)


def measured_responses(source: ResponseSource, moments: RunningMoments, split: str) -> HeldOut:
    """Responses to the prompts of a held-out split, with their returns.

    Raises:
        SamplerDisagrees: the policy's log-probabilities are not those that it sampled with.
    """
    work = source.job.work
    with progress.within(split):
        rollout = shape(source.models, source.held_out(split), returns=work.returns, moments=moments)
    compare_with_sampler(rollout.logprobs, rollout.sampled, precision=work.precision)
    returns = monte_carlo_returns(rollout.rewards, rollout.sequences.response_mask, gamma=work.returns.gamma)
    return HeldOut(rollout=rollout, returns=returns)


def regress(
    critic: ScalarModel,
    optimizer: Optimizer,
    rollout: Rollout,
    returns: Tensor,
    job: StageJob[ResolvedValuePretraining],
    *,
    iteration: int,
) -> dict[str, float]:
    """All optimiser steps of one rollout; returns the metrics of the last."""
    work = job.work
    metrics: dict[str, float] = {}
    for step in OptimizerSteps(rollout.sequences, work, seed=stage_seed(job), iteration=iteration):
        metrics = accumulate_value_loss(critic, rollout, returns, step.rows, work)
        metrics |= update_weights(optimizer, critic, work, step=step.number, total_steps=step.total)
    return metrics


def accumulate_value_loss(
    critic: ScalarModel, rollout: Rollout, returns: Tensor, rows: Tensor, work: ResolvedValuePretraining
) -> dict[str, float]:
    """Add the gradient of one minibatch's value loss, micro-batch by micro-batch; returns its metrics."""
    sums, losses = MetricSums(), LossSums()
    minibatch, of_minibatch = rollout.sequences.select(rows), returns[rows]
    denominator = sum(minibatch.known.responses)
    for part in passes_of(minibatch, work.pass_limits):
        micro = part.select(minibatch)
        targets = of_minibatch[part.rows, : micro.response_ids.shape[1]]
        with autocast(work.precision, targets.device):
            predicted = values(critic, micro)
        result = value_loss(predicted.float(), None, targets, micro.response_mask, denominator=denominator)
        (part.weight * result.loss).backward()
        sums.add(result, part.weight)
        losses.add("value_loss", result.loss, part.weight)
    return {**losses.totals(), "value_bias": sums.means()["value_bias"]}


def diagnose(critic: ScalarModel, held_out: HeldOut, models: RolloutModels) -> ValueDiagnostics:
    """Explained variance and what it hides, over the whole held-out set at once."""
    predicted, mask = predict(critic, held_out, models), held_out.rollout.sequences.response_mask
    return value_diagnostics(predicted, held_out.returns, mask, num_positions=POSITIONS)


def predict(critic: ScalarModel, held_out: HeldOut, models: RolloutModels) -> Tensor:
    """Values (B,T) of the held-out responses' prefixes."""
    with progress.within("validation"):
        return rollout_values(critic, held_out.rollout.sequences, models)


def validate(
    attempt: Attempt[ValueState],
    critic: ScalarModel,
    optimizer: Optimizer | None,
    held_out: HeldOut,
    models: RolloutModels,
    *,
    iteration: int,
) -> dict[str, float]:
    """Measure the critic; remember its weights when it explains more than any before, and the optimiser's state with them
    where there is one. Returns what to log."""
    metric = "validation_explained_variance"
    measured = diagnose(critic, held_out, models).explained_variance
    is_best = keep_if_best(attempt, critic, measured, metric=metric, iteration=iteration)
    if is_best and optimizer is not None:
        attempt.best |= carried_optimizer.state_of(optimizer, critic)
    without_gain = 0 if is_best else attempt.state.without_gain + 1
    attempt.state = replace(attempt.state, without_gain=without_gain)
    return {metric: measured}


def headline_metrics(measured: ValueDiagnostics) -> dict[str, float | None]:
    """The diagnostics under the names that gates and the ledger use; None where one is undefined."""
    by_position = {
        f"explained_variance_position_{number}": defined(part)
        for number, part in enumerate(measured.explained_variance_by_position, start=1)
    }
    return {
        "explained_variance": defined(measured.explained_variance),
        "return_variance": measured.return_variance,
        "value_bias": measured.bias,
        "value_mse": measured.mse,
        "constant_mse": measured.constant_mse,
        **by_position,
    }
