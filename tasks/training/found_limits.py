"""Find the largest size of a stage's passes for which memory suffices, before the first step, if its recipe gives none.

The size changes memory, and results only by rounding. A resumed attempt uses the size of the attempt before.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch.optim import Optimizer

from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import FoundLimits, PassLimits
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Codec, Completions, Prompts, Rankings
from vantage.tasks.training import memory_meter, progress, ranks
from vantage.tasks.training.memory_meter import Meter
from vantage.tasks.training.memory_probe import (
    Compute,
    Cost,
    Row,
    bytes_that_train,
    gradients_to_come,
    moments_to_come,
    pass_costs,
    sampling_cost,
)
from vantage.tasks.training.optimization import Precision
from vantage.tasks.training.scratch import read_found, write_found
from vantage.tasks.training.writer import writes_files

log = logging.getLogger(__name__)

MARGIN = 0.1
"""Share of the memory that is left free, for memory needs that were not measured and for fragmentation."""
STEPS = 8
"""Number of sizes between two powers of 2 to which sizes are rounded down, so that a few bytes do not change them."""

Job = TypeVar("Job", bound=StageJob[Stage])


@dataclass(frozen=True)
class Sampler:
    """A policy that a stage samples from."""

    policy: PolicyModel
    precision: Precision
    pad_token_id: int
    beside_training: bool = False
    """Whether it samples while training runs; then each of the two gets half of the free memory."""


@dataclass(frozen=True)
class Taken:
    """Everything that a stage computes, by which the memory of its passes is measured."""

    row: Row
    computes: Sequence[Compute] = ()
    """The passes of each network that trains; without optimisers, the passes of a network that only reads."""
    precision: Precision = "float32"
    optimizers: Sequence[Optimizer] = ()
    sampler: Sampler | None = None


def longest_row(examples: Completions | Rankings, *, shares_prompt: bool = False) -> Row:
    """Return the longest row of a dataset; several responses may share a prompt."""
    lengths = examples.lengths()
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    prompt = len(examples.prompt_ids[longest])
    return Row(prompt, lengths[longest] - prompt, shares_prompt)


def longest_response(prompts: Prompts, generation: Generation, *, shares_prompt: bool = False) -> Row:
    """Return the row of the longest prompt with the longest response that may be sampled."""
    return Row(max(map(len, prompts.ids)), generation.max_response_tokens, shares_prompt)


def taken_by_reading(policy: PolicyModel, codec: Codec, prompts: Iterable[Prompts], work: Stage) -> Taken:
    """Return the memory needs of a policy that does not train: it samples responses to the prompts, and reads them."""
    longest = max(prompts, key=lambda each: max(map(len, each.ids), default=0))
    return Taken(
        longest_response(longest, codec.generation, shares_prompt=work.pass_limits.share_prompts),
        [lambda batch: policy.logprobs(batch, temperature=1.0).logprobs],
        work.arithmetic,
        sampler=Sampler(policy, work.arithmetic, codec.pad_token_id),
    )


def found_limits(
    job: StageJob[Stage], taken: Taken, *, device: torch.device, other: str | None = None
) -> FoundLimits | None:
    """Return the sizes for which memory suffices; None: the recipe gives them, or memory is not measured on this device.

    Every rank uses the smallest size that any rank found.

    Args:
        other: role of a model that is measured after the stage's first model, and has its own limits.
    """
    meter = memory_meter.meter()
    if meter is None:
        return None
    first = read_found(job.scratch, device=meter.device)
    found = first if other is None else read_found(job.scratch, device=meter.device, other=other)
    if ranks.any_rank(found is None):
        is_given = job.work.microbatch_tokens is not None
        if is_given and (other is None or ranks.any_rank(first is None)):
            return None
        found = _find(taken, device, meter)
        ranks.wait()  # no rank reads the limits of an earlier attempt any more
        if writes_files():
            write_found(job.scratch, found, device=meter.device, other=other)
        log.info("%s%s", "" if other is None else f"{other}: ", found.described)
    return found


def within_memory(job: Job, found: FoundLimits | None) -> Job:
    """Return the job with its passes limited to the found positions, or to the smaller limit after memory ran out."""
    if found is None:
        return job
    given = job.work.microbatch_tokens
    tokens = found.tokens if given is None else min(given, found.tokens)
    return job.model_copy(update={"work": job.work.model_copy(update={"microbatch_tokens": tokens})})


def sampling_limits(
    limits: PassLimits, found: FoundLimits, *, given: int | None, rows: int | None
) -> PassLimits:
    """Return the limits of the responses that are sampled together: the found ones, or smaller ones after memory ran
    out.

    Args:
        limits: limits of the stage's other passes.
        given: ``microbatch_tokens`` before anything was found.
        rows: ``rollout.max_rows``. The stage's ``microbatch_size`` is about passes that train.
    """
    if found.sampled_tokens is None:
        return replace(limits, rows=rows or limits.rows)
    tokens = found.sampled_tokens if given is None else min(given, found.sampled_tokens)
    return replace(limits, rows=rows, tokens=tokens)


def _find(taken: Taken, device: torch.device, meter: Meter) -> FoundLimits:
    progress.phase("measuring memory")
    row, sampler, gradients = taken.row, taken.sampler, gradients_to_come(taken.optimizers)
    beside = sampler is not None and sampler.beside_training
    room = meter.limit() * (1 - MARGIN) - moments_to_come(taken.optimizers)
    if sampler is not None and beside:
        room -= bytes_that_train(sampler.policy.parameters())  # subtract the copy of the policy that samples
    costs = partial(
        pass_costs,
        taken.computes,
        taken.optimizers,
        row,
        precision=taken.precision,
        device=device,
        meter=meter,
    )
    tokens = _most(costs, room, share=0.5 if beside else 1.0, row=row)
    sampled = None
    if sampler is not None:
        sampled = _most(
            lambda: [
                sampling_cost(
                    sampler.policy,
                    row,
                    precision=sampler.precision,
                    pad_token_id=sampler.pad_token_id,
                    meter=meter,
                    reserved=moments_to_come(taken.optimizers),
                )
            ],
            room - gradients if beside else room,
            share=0.5 if beside else 1.0,
            row=row,
        )
    meter.begin()  # what was measured does not count in the first step's peak
    return FoundLimits(tokens=tokens, sampled_tokens=sampled)


def _most(costs: Callable[[], list[Cost]], room: float, *, share: float, row: Row) -> int:
    """Return the positions for which the room suffices on every rank, at least those of one row, which cannot be
    divided.

    Args:
        costs: function that measures the cost of passes.
        share: share of the free memory that passes may use.
    """
    try:
        fitting = min((cost.positions_in(room, share=share) for cost in costs()), default=0)
    except torch.OutOfMemoryError as error:
        if ranks.are_sharded():  # the others wait for this rank's part of the weights
            raise
        log.warning("two of the longest sequences do not fit side by side: %s", error)
        fitting = 0
    return ranks.least(max(row.total, rounded(fitting)))


def rounded(positions: int) -> int:
    """Round down to one of ``STEPS`` numbers between two powers of 2.

    >>> rounded(70_000)
    65536
    """
    unit = max(1, (1 << positions.bit_length() - 1) // STEPS) if positions else 1
    return positions // unit * unit
