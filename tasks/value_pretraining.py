"""Pretrain a critic alone on Monte-Carlo returns of a fixed policy (VC-PPO, VAPO §4.1).

A reward model scores unfinished text low. As a critic it therefore sees progress everywhere, and rewards the earliest
tokens most. Here the critic learns the true values of the policy's prefixes, under the same reward that the policy
will see, before any policy update. Its quality is measured as explained variance on prompts that it was not trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.optim import Optimizer

from vantage.models.adapters import has_adapters
from vantage.models.folders import tokenizer_digest
from vantage.models.heads import ScalarModel, save_value
from vantage.schemas.recipe.resolved import ResolvedValuePretraining
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.splits import TEST, VALIDATION
from vantage.tasks.rollout.critic_diagnosis import (
    diagnose_critic,
    diagnosis_metrics,
    uncertainty_of_diagnosis,
    write_diagnosis,
)
from vantage.tasks.rollout.critic_outputs import form_metrics
from vantage.tasks.rollout.critic_tokenizer import refuse_other_tokenizer_of_critic
from vantage.tasks.rollout.response_source import load_source
from vantage.tasks.rollout.returns import Returned, measured_responses, score_moments, training_rollout
from vantage.tasks.rollout.reward_moments import write_moments
from vantage.tasks.rollout.rollout_models import RolloutModels, load_rollout_models
from vantage.tasks.rollout.value_measures import diagnose, headline_metrics, predict
from vantage.tasks.training import carried_optimizer
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.best_weights import keep_if_best
from vantage.tasks.training.networks import fixed_policy, put_back, trained_critic
from vantage.tasks.training.optimization import optimizer_of, training_device
from vantage.tasks.training.stage_state import BestSoFar
from vantage.tasks.updates.value_regression import regress


@dataclass(frozen=True)
class ValueState(BestSoFar):
    """State that is saved in the checkpoints beside the critic."""

    without_gain: int = 0
    """Number of validations since the best one."""


def run(job: StageJob[ResolvedValuePretraining]) -> StageResult:
    """Pretrain the critic that starts from ``init`` on responses of ``policy``; the artifact is a value model."""
    work, device = job.work, training_device()
    refuse_other_tokenizer_of_critic(job, "init", "policy")

    # 1. Load the fixed policy, the reward of the policy stage, and a critic
    models = load_rollout_models(
        job,
        work,
        fixed_policy(job, "policy", device),
        role="policy",
        with_reference=bool(work.returns.kl_coef),
        with_scorer=bool(work.fresh_responses),
    )
    critic = trained_critic(job, device)
    optimizer = optimizer_of(critic, work)

    # 2. Prepare the source of responses, and the responses to validation prompts for measuring
    source = load_source(job, models).ready(critic, optimizer)
    job, models = source.job, source.models
    encoding = encoding_metrics(job, "prompts", [source.prompts])
    moments = score_moments(source)
    held_out = measured_responses(source, moments, VALIDATION)
    validation = Validation(critic, optimizer if work.keep_optimizer else None, held_out, models)

    with (
        Attempt(
            job,
            total=work.iterations,
            modules={"critic": critic},
            optimizers={"critic": optimizer},
            state=ValueState(),
            keeps_best=True,
        ) as attempt,
        models.sampling(),
    ):
        if not attempt.best:
            validation.keep_if_best(attempt, iteration=0)
        for iteration in attempt.remaining():
            # 3. Take a rollout of the fixed policy, fresh or collected, with its Monte-Carlo returns
            with attempt.unmoved():
                learned = training_rollout(source, moments, iteration)
            source.begin_next(iteration)

            # 4. Regress on them, without a value clip, since the critic is still far from its targets
            metrics = learned.gap | regress(critic, optimizer, learned, job, iteration=iteration)

            # 5. Keep the critic that best explains unseen prompts; more steps are not always better
            if attempt.is_due(work.validate_every):
                metrics |= validation.keep_if_best(attempt, iteration=iteration + 1)
                if attempt.state.without_gain >= work.patience:
                    attempt.stop()
            num_tokens = int(learned.rollout.sequences.attention_mask.sum())
            attempt.finish_step(metrics | learned.means(), num_tokens=num_tokens, headline="value_loss")
        put_back(critic, attempt.best)

    # 6. Measure it on prompts that were not used for selection: the best of several measurements is optimistic
    test = measured_responses(source, moments, TEST)
    base = job.base_digest("init") if has_adapters(critic) else None
    save_value(critic, models.codec.tokenizer, job.output, base=base)
    if work.keep_optimizer:
        carried_optimizer.write_state(job.output, attempt.best)
    if moments.count:
        write_moments(job.output, moments)
    return result_of(job, critic, test, models, attempt, encoding=encoding, base=base)


def result_of(
    job: StageJob[ResolvedValuePretraining],
    critic: ScalarModel,
    test: Returned,
    models: RolloutModels,
    attempt: Attempt[ValueState],
    *,
    encoding: Mapping[str, float],
    base: str | None,
) -> StageResult:
    """Return metrics of the kept critic on responses to test prompts; its diagnosis is written beside it."""
    measured = diagnose(critic, test, models)
    diagnosis = diagnose_critic(
        predict(critic, test, models),
        test.returns,
        test.rollout.sequences.response_mask,
        test.rollout.sampled.prompts,
        iterations=attempt.length,
        best_iteration=attempt.state.best_iteration,
    )
    write_diagnosis(job.output, diagnosis)
    return StageResult(
        metrics={
            **diagnosis_metrics(diagnosis),
            **headline_metrics(measured),
            **form_metrics(critic, test, models),
            "validation_explained_variance": attempt.state.best,
            "best_iteration": attempt.state.best_iteration,
            **encoding,
        },
        uncertainty=uncertainty_of_diagnosis(diagnosis),
        tokenizer_digest=tokenizer_digest(job.output),
        base=base,
    )


@dataclass(frozen=True)
class Validation:
    """Measures a critic, always on the same responses to validation prompts."""

    critic: ScalarModel
    optimizer: Optimizer | None
    """The critic's optimiser, if the artifact keeps its state."""
    held_out: Returned
    models: RolloutModels

    def keep_if_best(self, attempt: Attempt[ValueState], *, iteration: int) -> dict[str, float]:
        """Measure the critic. If it explains more than any before, remember its weights, with the optimiser's state if
        the artifact keeps it. Returns the metrics to log."""
        metric = "validation_explained_variance"
        measured = diagnose(self.critic, self.held_out, self.models).explained_variance
        is_best = keep_if_best(attempt, self.critic, measured, metric=metric, iteration=iteration)
        if is_best and self.optimizer is not None:
            attempt.best |= carried_optimizer.state_of(self.optimizer, self.critic)
        without_gain = 0 if is_best else attempt.state.without_gain + 1
        attempt.state = replace(attempt.state, without_gain=without_gain)
        return {metric: measured}
