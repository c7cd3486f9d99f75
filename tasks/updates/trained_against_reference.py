"""Train a policy on rows of responses beside its frozen reference, for stages on pairs and on labelled responses."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from vantage.schemas.recipe.resolved import (
    ResolvedDirectPreferenceOptimization,
    ResolvedKahnemanTverskyOptimization,
)
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Completions
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.data_order import order_of
from vantage.tasks.training.found_limits import Taken, found_limits, within_memory
from vantage.tasks.training.memory_probe import Row
from vantage.tasks.training.networks import fixed_policy, trained_policy
from vantage.tasks.training.optimization import optimizer_of, training_device, update_weights
from vantage.tasks.training.seeds import stage_seed
from vantage.tasks.training.stage_state import NoState
from vantage.tasks.updates.against_reference import Models, both_logprobs, refuse_another_tokenizer

Work = TypeVar("Work", ResolvedDirectPreferenceOptimization, ResolvedKahnemanTverskyOptimization)

Accumulate = Callable[[Models, Completions, Sequence[int], Work], tuple[dict[str, float], int]]
"""Function that adds the gradient of the mean loss of a minibatch, given as indices of rows, and returns its metrics
and tokens."""


def load_models(job: StageJob[Work], *, reads_reference: bool) -> Models:
    """Load the policy that learns, and its frozen reference if the loss reads one.

    Raises:
        TokenizersDiffer: the reference reads other tokens than the policy.
    """
    device = training_device()
    if reads_reference:
        refuse_another_tokenizer(job, reference=job.work.reference, init=job.work.init)
    return Models(
        policy=trained_policy(job, device),
        reference=fixed_policy(job, "reference", device) if reads_reference else None,
        temperature=job.generation.temperature,
    )


def train_on_rows(
    job: StageJob[Work], models: Models, rows: Completions, *, longest: Row, accumulate: Accumulate[Work]
) -> Work:
    """Take all optimiser steps over the rows, from the last step of an earlier attempt on.

    Args:
        longest: the row that needs the most memory; it decides how large passes may be.

    Returns:
        The stage's work with the limits of passes that were found.
    """
    work = job.work
    optimizer = optimizer_of(models.policy, work)
    order = order_of(rows, work, stage_seed(job))
    num_steps = order.num_batches(work.epochs)
    taken = Taken(
        longest,
        [lambda batch: both_logprobs(models, batch, precision=work.arithmetic)[0]],
        work.arithmetic,
        [optimizer],
    )
    work = within_memory(job, found_limits(job, taken, device=models.policy.device)).work
    with Attempt(
        job,
        total=num_steps,
        modules={"policy": models.policy.causal_lm},
        optimizers={"policy": optimizer},
        state=NoState(),
    ) as attempt:
        for step in attempt.remaining():
            metrics, num_tokens = accumulate(models, rows, order.batch(step), work)
            metrics |= update_weights(optimizer, models.policy, work, step=step, total_steps=num_steps)
            attempt.finish_step(metrics, num_tokens=num_tokens, headline="loss")
    return work
