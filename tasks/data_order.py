"""Which example comes when: a pure function of (seed, epoch, position), so that any position can be resumed."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from tasks.seeds import generator


def batch_indices(
    batch: int, *, batch_size: int, num_examples: int, seed: int, first_epoch: Sequence[int] | None = None
) -> list[int]:
    """The examples of batch number ``batch`` (from 0); batches run on over the ends of epochs, so all are full.

    Args:
        first_epoch: the order of epoch 0 where it is not shuffled (``short_first``).
    """
    indices = []
    for position in range(batch * batch_size, (batch + 1) * batch_size):
        epoch, offset = divmod(position, num_examples)
        order = first_epoch if epoch == 0 and first_epoch is not None else shuffled(num_examples, seed, epoch)
        indices.append(order[offset])
    return indices


@lru_cache(maxsize=2)
def shuffled(num_examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of the examples, its own in every epoch."""
    return tuple(torch.randperm(num_examples, generator=generator(seed, "order", epoch)).tolist())


def short_first(lengths: Sequence[int], seed: int) -> tuple[int, ...]:
    """A curriculum: from short to long (in tokens), in random order among examples of one length."""
    return tuple(sorted(shuffled(len(lengths), seed, 0), key=lengths.__getitem__))


def num_batches(*, epochs: float, num_examples: int, batch_size: int) -> int:
    """Batches in so many epochs, the last one filled up from the next epoch; at least one."""
    return max(1, -(-round(epochs * num_examples) // batch_size))
