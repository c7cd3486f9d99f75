"""The optimiser steps of one rollout: its rows in minibatches, epoch after epoch."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.models.sequences import Sequences
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization, Rollouts, ValuePretraining
from vantage.tasks.training import progress
from vantage.tasks.training.seeds import generator


@dataclass(frozen=True)
class Step:
    """One optimiser step, with its number in the whole stage, by which the learning rate is scheduled."""

    rows: Tensor
    """(b,), on the CPU: the rows of the rollout that the step learns from."""
    number: int
    """Number of the step, from 0, counted over all iterations."""
    total: int
    """Number of steps of the whole stage."""


class OptimizerSteps:
    """The optimiser steps of one iteration, to be iterated over once; every epoch contains each row of the rollout once.

    Minibatches are a pure function of the seed and the iteration.
    """

    def __init__(
        self,
        sequences: Sequences,
        work: ValuePretraining | PolicyOptimization | BestOfN | Distillation,
        *,
        seed: int,
        iteration: int,
    ) -> None:
        self._epochs = minibatches(sequences, work, seed=seed, iteration=iteration)
        self._iteration, self._num_iterations = iteration, work.iterations
        self._epoch_ended = False

    def __iter__(self) -> Iterator[Step]:
        per_epoch = len(self._epochs[0])
        per_iteration = len(self._epochs) * per_epoch
        for epoch, cut in enumerate(self._epochs):
            self._epoch_ended = False
            for index, rows in enumerate(cut):
                done = epoch * per_epoch + index
                progress.phase("updating", done, per_iteration)
                yield Step(
                    rows,
                    number=self._iteration * per_iteration + done,
                    total=self._num_iterations * per_iteration,
                )
                if self._epoch_ended:
                    break

    def end_epoch(self) -> None:
        """Go on with the next epoch; the omitted steps keep their numbers."""
        self._epoch_ended = True


def minibatches(sequences: Sequences, work: Rollouts, *, seed: int, iteration: int) -> list[list[Tensor]]:
    """Return row indices of each optimiser step, by epoch; the order of every epoch is a pure function of the seed.

    Within a minibatch, rows are sorted from short to long, so that micro-batches contain little padding; the gradient of a
    minibatch does not depend on the order of its rows.
    """
    lengths = sequences.attention_mask.sum(dim=1).cpu()
    epochs = []
    for epoch in range(work.epochs):
        order = torch.randperm(len(sequences), generator=generator(seed, "minibatches", iteration, epoch))
        cut = torch.split(order, work.minibatch_size)
        epochs.append([rows[lengths[rows].argsort(stable=True)] for rows in cut])
    return epochs
