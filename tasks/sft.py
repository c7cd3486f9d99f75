"""Supervised fine-tuning: maximum likelihood of demonstrated responses given their prompts."""

from vantage.algorithms.uncertainty import Estimate, clustered_ratio
from vantage.models.folders import tokenizer_digest
from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.resolved import ResolvedSupervisedFineTuning
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.encoding_counts import encoding_metrics
from vantage.tasks.data.examples import Completions, codec_of, read_completions
from vantage.tasks.data.splits import TEST, TRAIN, VALIDATION
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.data_order import order_of
from vantage.tasks.training.found_limits import Taken, found_limits, longest_row, within_memory
from vantage.tasks.training.likelihood import accumulate_nll, measure_likelihood
from vantage.tasks.training.measured import uncertainty_of, values_of
from vantage.tasks.training.networks import trained_policy, write_policy
from vantage.tasks.training.optimization import (
    optimizer_of,
    training_device,
    update_weights,
)
from vantage.tasks.training.packing_check import check_boundaries
from vantage.tasks.training.seeds import stage_seed
from vantage.tasks.training.stage_state import NoState


def run(job: StageJob[ResolvedSupervisedFineTuning]) -> StageResult:
    """Train ``init`` on ``data``; the artifact is a policy."""
    work = job.work
    device = training_device()

    # 1. The model, and every demonstration as ids
    codec = codec_of(job, "init")
    policy = trained_policy(job, device)
    train, validation, test = (
        read_completions(job.inputs["data"], split, ["response"], codec, train_on=work.train_on)
        for split in (TRAIN, VALIDATION, TEST)
    )
    encoding = encoding_metrics(job, "data", [train, validation, test])
    if work.packing:
        check_boundaries(policy, train)
    optimizer = optimizer_of(policy, work)
    order = order_of(train, work, stage_seed(job))
    num_steps = order.num_batches(work.epochs)
    taken = Taken(
        longest_row(train),
        [lambda batch: policy.logprobs(batch, temperature=1.0).logprobs],
        work.arithmetic,
        [optimizer],
    )
    work = within_memory(job, found_limits(job, taken, device=device)).work

    # 2. Take optimiser steps, from the last step of an earlier attempt on
    with Attempt(
        job,
        total=num_steps,
        modules={"policy": policy.causal_lm},
        optimizers={"policy": optimizer},
        state=NoState(),
    ) as attempt:
        for step in attempt.remaining():
            batch = train.batch(order.batch(step)).to(device)
            loss = accumulate_nll(
                policy,
                batch,
                temperature=1.0,
                limits=work.pass_limits,
                precision=work.arithmetic,
                packing=work.packing,
            ).nll
            rates = update_weights(optimizer, policy, work, step=step, total_steps=num_steps)
            attempt.finish_step({"loss": loss, **rates}, num_tokens=sum(batch.known.totals), headline="loss")

    # 3. Measure how well the policy predicts demonstrations that it has not seen
    at_once = work.pass_limits.or_rows(work.batch_size)
    measured = {
        "validation_nll": mean_nll(policy, validation, limits=at_once),
        "test_nll": mean_nll(policy, test, limits=at_once),
    }
    written = write_policy(job, policy.causal_lm, codec.tokenizer)
    return StageResult(
        metrics={**values_of(measured), **encoding},
        uncertainty=uncertainty_of(measured),
        tokenizer_digest=tokenizer_digest(job.output),
        base=written.base,
        same_as_base=written.same_as_base,
    )


def mean_nll(policy: PolicyModel, examples: Completions, *, limits: PassLimits) -> Estimate:
    """Return the mean NLL over all learnt tokens (nats/token); all responses to one prompt are one cluster."""
    measured = measure_likelihood(policy, examples, limits=limits)
    return clustered_ratio(measured.nll, measured.num_tokens, measured.clusters)
