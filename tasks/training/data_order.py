"""Which example comes when: a pure function of (seed, epoch, position), so that any position can be resumed."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch

from vantage.schemas.recipe.stages import DirectPreferenceOptimization, RewardModelling, SupervisedFineTuning
from vantage.tasks.training.seeds import generator

WINDOW_BATCHES = 16
"""Batches among which examples of like length are put together; few, so that an epoch stays well mixed."""


class Examples(Protocol):
    """What is trained on, as ``vantage.tasks.data.examples`` reads it."""

    def __len__(self) -> int: ...

    def lengths(self) -> Sequence[int]:
        """Return tokens of each example's longest sequence."""


@dataclass(frozen=True)
class DataOrder:
    """The endless stream of examples, cut into batches: epoch after epoch, each in an order of its own."""

    num_examples: int
    batch_size: int
    seed: int
    lengths: Sequence[int] | None = field(default=None, hash=False)
    """Of the examples, in tokens: batches are then of like length. None: plainly shuffled."""

    def batch(self, number: int) -> list[int]:
        """Return the examples of batch ``number`` (from 0); batches run on over the ends of epochs, so all are full."""
        indices = []
        for position in range(number * self.batch_size, (number + 1) * self.batch_size):
            epoch, offset = divmod(position, self.num_examples)
            indices.append(_epoch(self, epoch)[offset])
        return indices

    def num_batches(self, epochs: float) -> int:
        """Return batches in so many epochs, the last one filled up from the next epoch; at least one."""
        return max(1, -(-round(epochs * self.num_examples) // self.batch_size))


def order_of(
    examples: Examples,
    work: SupervisedFineTuning | RewardModelling | DirectPreferenceOptimization,
    seed: int,
) -> DataOrder:
    """Return the order in which a stage trains on its examples: as its ``batch_size`` and ``group_by_length`` say."""
    return DataOrder(
        num_examples=len(examples),
        batch_size=work.batch_size,
        seed=seed,
        lengths=examples.lengths() if work.group_by_length else None,
    )


# By value, so that an order that is made anew finds its epoch; two, for a batch that runs on into the next
@lru_cache(maxsize=2)
def _epoch(order: DataOrder, epoch: int) -> Sequence[int]:
    draw = generator(order.seed, "order", epoch)
    # An array, since two lists of ten million integers take 800 MB
    shuffled = array("q", torch.randperm(order.num_examples, generator=draw).numpy().tobytes())
    if order.lengths is None:
        return shuffled
    grouped = array("q")
    window = WINDOW_BATCHES * order.batch_size
    for start in range(0, order.num_examples, window):
        alike = sorted(shuffled[start : start + window], key=order.lengths.__getitem__)
        batches = [alike[cut : cut + order.batch_size] for cut in range(0, len(alike), order.batch_size)]
        grouped.extend(index for batch in _shuffled(batches, draw) for index in batch)
    return grouped


def _shuffled(batches: Sequence[list[int]], draw: torch.Generator) -> list[list[int]]:
    return [batches[place] for place in torch.randperm(len(batches), generator=draw).tolist()]
