"""Order the examples of a stage: a pure function of (seed, epoch, position), so that it can be resumed at any position."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch

from vantage.schemas.recipe.stages_on_data import (
    DirectPreferenceOptimization,
    RewardModelling,
    SupervisedFineTuning,
)
from vantage.schemas.recipe.unpaired import KahnemanTverskyOptimization
from vantage.tasks.training.seeds import generator

WINDOW_BATCHES = 16
"""Number of batches among which examples of similar length are grouped; it is small, so that an epoch stays well mixed."""


class Examples(Protocol):
    """Training examples as ``vantage.tasks.data.examples`` reads them."""

    def __len__(self) -> int: ...

    def lengths(self) -> Sequence[int]:
        """Return tokens of each example's longest sequence."""


@dataclass(frozen=True)
class DataOrder:
    """The endless stream of examples, cut into batches; each epoch has its own order."""

    num_examples: int
    batch_size: int
    seed: int
    lengths: Sequence[int] | None = field(default=None, hash=False)
    """Lengths of the examples in tokens, to make batches of similar length; None: plainly shuffled."""
    easiness: Sequence[float] | None = field(default=None, hash=False)
    """Numbers by which the examples of each epoch are ordered, the largest first; ties stay shuffled. None: no
    order."""

    def batch(self, number: int) -> list[int]:
        """Return the examples of batch ``number`` (from 0); batches continue over the ends of epochs, so all are full."""
        indices = []
        for position in range(number * self.batch_size, (number + 1) * self.batch_size):
            epoch, offset = divmod(position, self.num_examples)
            indices.append(_epoch(self, epoch)[offset])
        return indices

    def num_batches(self, epochs: float) -> int:
        """Return the number of batches in ``epochs`` epochs, at least 1; the last batch is filled up from the next
        epoch."""
        return max(1, -(-round(epochs * self.num_examples) // self.batch_size))


def order_of(
    examples: Examples,
    work: SupervisedFineTuning | RewardModelling | DirectPreferenceOptimization | KahnemanTverskyOptimization,
    seed: int,
) -> DataOrder:
    """Return the order of a stage's training examples, by its ``batch_size`` and ``group_by_length``."""
    return DataOrder(
        num_examples=len(examples),
        batch_size=work.batch_size,
        seed=seed,
        lengths=examples.lengths() if work.group_by_length else None,
    )


# Cached by value, so that an equal order finds its epoch. Two entries, since a batch may continue into the next epoch
@lru_cache(maxsize=2)
def _epoch(order: DataOrder, epoch: int) -> Sequence[int]:
    draw = generator(order.seed, "order", epoch)
    # An array, since two lists of ten million integers take 800 MB
    shuffled = array("q", torch.randperm(order.num_examples, generator=draw).numpy().tobytes())
    if order.easiness is not None:
        easiness = order.easiness
        return array("q", sorted(shuffled, key=lambda index: -easiness[index]))
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
