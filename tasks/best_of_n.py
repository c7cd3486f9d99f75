"""Best of n (RAFT): sample, keep each prompt's best response by the reward, fine-tune on these, and repeat."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vantage.models.folders import tokenizer_digest
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.resolved import ResolvedBestOfN
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import Codec, Prompts, read_prompts
from vantage.tasks.data.splits import SPLITS, TRAIN
from vantage.tasks.rollout.collected import Collected, read_collected
from vantage.tasks.rollout.rollout_models import RolloutModels, load_rollout_models
from vantage.tasks.rollout.rollouts import Sampled, Scored
from vantage.tasks.rollout.selection import Measured, Selection, kept_by
from vantage.tasks.rollout.watching import load_watching
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.found_limits import Taken, longest_response
from vantage.tasks.training.likelihood import accumulate_nll
from vantage.tasks.training.measured import uncertainty_of, values_of
from vantage.tasks.training.networks import Written, trained_policy, write_policy
from vantage.tasks.training.optimization import optimizer_of, training_device
from vantage.tasks.training.seeds import stage_seed
from vantage.tasks.training.stage_state import BestSoFar
from vantage.tasks.updates.own_responses import (
    Accumulated,
    describe_responses,
    indices_of_iteration,
    sample_iteration,
    take_steps,
)


def run(job: StageJob[ResolvedBestOfN]) -> StageResult:
    """Fine-tune ``init`` on its own best responses; the artifact is the best policy by validation score."""
    work = job.work

    # 1. Policy, reward and prompts
    policy = trained_policy(job, training_device())
    models = load_rollout_models(job, work, policy, role="init", with_reference=False)
    codec = models.codec
    optimizer = optimizer_of(policy, work)
    train, validation, test = (read_prompts(job.inputs["prompts"], split, codec) for split in SPLITS)
    encoding = encoding_metrics(job, "prompts", [train, validation, test])
    taken = Taken(
        longest_response(train, job.generation),
        [lambda batch: policy.logprobs(batch, temperature=1.0).logprobs],
        work.arithmetic,
        [optimizer],
        models.sampler,
    )
    watching = load_watching(job, validation, codec, device=policy.device)
    models, job = models.ready(job, taken)
    work = job.work
    collected = read_training_responses(job, codec)
    selection = Selection(
        models,
        validation,
        num_samples=work.validation_samples,
        seed=stage_seed(job),
        watching=watching and watching.within(work.pass_limits),
        keeps_by_watch=work.keeps_by_watch,
    )

    with (
        Attempt(
            job,
            total=work.iterations,
            modules={"policy": policy.causal_lm},
            optimizers={"policy": optimizer},
            state=BestSoFar(),
            keeps_best=True,
        ) as attempt,
        models.sampling(),
    ):
        if not attempt.best:
            selection.keep_if_best(attempt, iteration=0)
        for iteration in attempt.remaining():
            # 2. Several responses to each prompt, scored: sampled now, or collected beforehand
            with attempt.unmoved():
                scored = responses_of_iteration(job, models, train, collected, iteration)

            # 3. Keep each prompt's best; a response that was cut off competes with its score after missing_eos
            best = best_rows(scored.scores.total, samples_per_prompt=work.samples_per_prompt)
            kept = scored.sampled.select(best.tolist())

            # 4. Fine-tune on the kept responses
            metrics = update(policy, optimizer, kept, job, iteration=iteration)
            metrics |= describe_responses(scored)
            metrics["best_score_mean"] = scored.scores.total[best].mean().item()
            models.sync_engine()

            # 5. Keep the policy that scores best on validation prompts
            if any(map(attempt.is_due, work.validations)):
                metrics |= selection.keep_if_best(attempt, iteration=iteration + 1)
            attempt.finish_step(
                metrics,
                num_tokens=int(scored.sampled.sequences.attention_mask.sum()),
                headline="best_score_mean",
            )
        selection.put_back_best(attempt)

    # 6. Measure the best policy
    measured = selection.measure(test, num_samples=work.test_samples or work.validation_samples)
    written = write_policy(job, policy.causal_lm, codec.tokenizer)
    return _result(job, measured, attempt.state, written, encoding)


def _result(
    job: StageJob[ResolvedBestOfN],
    measured: Measured,
    state: BestSoFar,
    written: Written,
    encoding: Mapping[str, float],
) -> StageResult:
    return StageResult(
        metrics={
            **values_of(measured.estimates),
            "reward_spread": measured.reward_spread,
            **kept_by(state, keeps_by_watch=job.work.keeps_by_watch),
            "best_iteration": state.best_iteration,
            **encoding,
        },
        uncertainty=uncertainty_of(measured.estimates),
        tokenizer_digest=tokenizer_digest(job.output),
        base=written.base,
        same_as_base=written.same_as_base,
    )


def read_training_responses(job: StageJob[ResolvedBestOfN], codec: Codec) -> Collected | None:
    """Return the collected responses to the training prompts, if the recipe names any."""
    if job.work.rollouts is None:
        return None
    digest = tokenizer_digest(job.inputs["init"])
    return read_collected(job.inputs["rollouts"], TRAIN, codec, tokenizer=digest)


def responses_of_iteration(
    job: StageJob[ResolvedBestOfN],
    models: RolloutModels,
    prompts: Prompts,
    collected: Collected | None,
    iteration: int,
) -> Scored:
    """Return the responses to an iteration's prompts: sampled now, or collected beforehand."""
    if collected is None:
        return sample_iteration(job, models, prompts, iteration)
    indices = indices_of_iteration(job, num_prompts=collected.num_prompts, iteration=iteration)
    rows = collected.rows_of(indices, count=job.work.samples_per_prompt)
    return collected.select(rows, models.policy.device)


def best_rows(scores: Tensor, *, samples_per_prompt: int) -> Tensor:
    """Return the row of each prompt's highest score, the first of equal ones: (B,) → (B / samples_per_prompt,).

    ``scores`` hold the samples of a prompt in a row (arXiv 2304.06767, algorithm 1).
    """
    first_rows = torch.arange(0, len(scores), samples_per_prompt, device=scores.device)
    return first_rows + scores.view(-1, samples_per_prompt).argmax(dim=1)


def update(
    policy: PolicyModel,
    optimizer: torch.optim.Optimizer,
    kept: Sampled,
    job: StageJob[ResolvedBestOfN],
    *,
    iteration: int,
) -> dict[str, float]:
    """Fine-tune on the kept responses, by all optimiser steps of one iteration; returns the means of their metrics."""
    work = job.work

    def accumulate(minibatch: Sampled, rows: list[int]) -> Accumulated:
        found = accumulate_nll(
            policy,
            minibatch.sequences,
            temperature=job.generation.temperature,
            limits=work.pass_limits,
            precision=work.arithmetic,
        )
        return Accumulated(found.logprobs, {"nll": found.nll})

    return take_steps(
        policy,
        optimizer,
        kept,
        job,
        iteration=iteration,
        accumulate=accumulate,
        is_sampler=work.rollouts is None,  # another policy may have sampled collected responses
    )
