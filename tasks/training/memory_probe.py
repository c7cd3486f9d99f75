"""Measure a few small passes before the first step to compute how many positions a pass may have; no state is changed by
them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from vantage.models.parts import in_parts
from vantage.models.pass_counts import add_counts, taken_counts
from vantage.models.policy import PolicyModel
from vantage.models.sampling import InStep, sample
from vantage.models.sequences import Sequences, collate
from vantage.models.sharding import local
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.cuts import Lengths, shared
from vantage.tasks.training.memory_meter import Meter
from vantage.tasks.training.optimization import Precision, autocast
from vantage.tasks.training.optimizer_state import state_bytes

Compute = Callable[[Sequences], Tensor]
"""A forward pass: sequences → a tensor whose sum has a gradient as large as that of the stage's loss."""

TOKENS = 2
"""Number of tokens that are sampled in a measurement: the second one is drawn beside the cache of the first."""


@dataclass(frozen=True)
class Row:
    """The longest sequence that a stage reads."""

    prompt: int
    response: int
    shares_prompt: bool = False
    """Whether a pass may read a prompt once for several responses."""

    @property
    def total(self) -> int:
        """Number of tokens."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Measured:
    """Peak bytes of a pass with this number of positions."""

    positions: int
    peak: int


@dataclass(frozen=True)
class Cost:
    """Memory of passes of one kind: fixed bytes, weights included, and bytes for each position."""

    fixed: float
    each: float

    def positions_in(self, room: float, *, share: float = 1.0) -> int:
        """Return the most positions for which ``room`` bytes suffice, or a share of the bytes above the fixed ones; 0: none."""
        return max(0, int((room - self.fixed) * share / self.each))


def cost_of(small: Measured, large: Measured) -> Cost:
    """Return the line through two measurements; if the larger pass needs no more memory, one byte per position is assumed."""
    each = max(1.0, (large.peak - small.peak) / (large.positions - small.positions))
    return Cost(fixed=small.peak - each * small.positions, each=each)


def pass_costs(
    computes: Sequence[Compute],
    optimizers: Iterable[Optimizer],
    row: Row,
    *,
    precision: Precision,
    device: torch.device,
    meter: Meter,
) -> list[Cost]:
    """Return the cost of each network's passes, forward and backward, with the gradients of all networks in memory.

    Separate sequences are measured, and, if a prompt may be shared, responses to one prompt. Each response gets a copy of the
    prompt's keys and values, which no position counts.
    """
    found = []
    with _nothing_moved(device):
        try:
            batches = [_alone(row, count, device) for count in (1, 2)]
            for compute in computes:  # first run, so that all gradients are in memory
                _pass(compute, batches[0], precision=precision, meter=meter)
            for compute in computes:
                pairs = [batches]
                if row.shares_prompt and not ranks.are_sharded():
                    pairs.append([_of_one_prompt(row, count, device) for count in (2, 3)])
                for pair in pairs:
                    small, large = (_pass(compute, each, precision=precision, meter=meter) for each in pair)
                    found.append(cost_of(small, large))
        finally:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
    return found


def sampling_cost(
    policy: PolicyModel,
    row: Row,
    *,
    precision: Precision,
    pad_token_id: int,
    meter: Meter,
    reserved: int = 0,
) -> Cost:
    """Return the cost of sampling for each position of its cache: the prompt's pass and a token's logits, divided by
    the positions of the row, plus keys and values.

    Args:
        reserved: bytes that will be taken otherwise before sampling begins.
    """

    def sampled(count: int) -> Measured:
        meter.begin()
        with autocast(precision, policy.device):
            sample(
                policy.causal_lm,
                _prompts(row.prompt, count),
                max_new_tokens=min(TOKENS, row.response),
                temperature=1.0,
                eos_token_ids=(),
                pad_token_id=pad_token_id,
                seed=0,
                greedy=True,
                in_step=_in_step(policy, reserved=reserved),
            )
        return Measured(count * row.total, meter.peak())

    with _nothing_moved(policy.device):
        progress.computing(1, row.total)
        small, large = sampled(1), sampled(2)
        cost = cost_of(small, large)
        later = _cache_bytes(policy, row.prompt, precision=precision, meter=meter) * row.response / row.total
    return Cost(cost.fixed, cost.each + later)


def moments_to_come(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of the state that the optimisers create in their first step, on this rank."""
    return sum(
        state_bytes(optimizer, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not optimizer.state.get(parameter)
    )


def gradients_to_come(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of all gradients, on this rank."""
    return sum(
        bytes_that_train(group["params"]) for optimizer in optimizers for group in optimizer.param_groups
    )


def bytes_that_train(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the weights that are not frozen, on this rank."""
    return sum(local(each).numel() * each.element_size() for each in parameters if each.requires_grad)


def _pass(compute: Compute, batch: Sequences, *, precision: Precision, meter: Meter) -> Measured:
    """Measure one pass; its gradients are added to the existing ones."""
    positions = _positions(batch)
    progress.computing(len(batch), positions)
    meter.begin()
    with autocast(precision, batch.input_ids.device):
        found = compute(batch)
    if found.requires_grad:
        found.float().sum().backward()
    del found
    return Measured(positions, meter.peak())


def _positions(batch: Sequences) -> int:
    """Count positions as ``microbatch_tokens`` counts them."""
    return (
        batch.input_ids.numel()
        if batch.layout is None
        else shared(Lengths(batch), range(len(batch))).positions
    )


def _alone(row: Row, count: int, device: torch.device) -> Sequences:
    """Return sequences of the longest row's length, one row each."""
    return collate(_prompts(row.prompt, count), [[0] * row.response] * count, pad_token_id=0).to(device)


def _of_one_prompt(row: Row, count: int, device: torch.device) -> Sequences:
    """Return responses to one prompt, which is read once."""
    batch = collate(_prompts(row.prompt, 1) * count, [[0] * row.response] * count, pad_token_id=0).to(device)
    return in_parts(batch, shared(Lengths(batch), range(count)).cuts)


def _prompts(length: int, count: int) -> list[list[int]]:
    """Return prompts that differ, so that none is shared."""
    return [[number % 2] * length for number in range(count)]


def _in_step(policy: PolicyModel, *, reserved: int = 0) -> InStep | None:
    """Return settings with which all ranks sample the same number of tokens, whatever the tokens are."""
    if not ranks.are_sharded():
        return None
    return InStep(forward=policy.next_logits, num_batches=1, all_ended=lambda ended: ended, reserved=reserved)


@torch.no_grad()
def _cache_bytes(policy: PolicyModel, length: int, *, precision: Precision, meter: Meter) -> float:
    """Return the bytes of one position's keys and values, in all layers."""
    model: PreTrainedModel = policy.causal_lm
    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    forward: Callable[..., Any] = model if _in_step(policy) is None else policy.next_logits
    before = meter.taken()
    with autocast(precision, model.device):
        cache = forward(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    after = meter.taken()
    del cache
    return max(0, after - before) / length


@contextmanager
def _nothing_moved(device: torch.device) -> Iterator[None]:
    """Restore random states and the counts of passes after the block."""
    counted = taken_counts()
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        taken_counts()
        add_counts(counted)
