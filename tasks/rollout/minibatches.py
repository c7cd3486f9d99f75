"""How a rollout is cut for its optimiser steps."""

import torch
from torch import Tensor

from models.sequences import Sequences
from schemas.recipe.stages import Rollouts
from tasks.training.seeds import generator


def minibatches(sequences: Sequences, work: Rollouts, *, seed: int, iteration: int) -> list[list[Tensor]]:
    """Row indices of each optimiser step, by epoch; every epoch in an order of its own, a pure function of the seed.

    Within a minibatch rows stand from short to long, so that micro-batches carry little padding; the gradient of a
    minibatch does not depend on the order of its rows.
    """
    lengths = sequences.attention_mask.sum(dim=1).cpu()
    epochs = []
    for epoch in range(work.epochs):
        order = torch.randperm(len(sequences), generator=generator(seed, "minibatches", iteration, epoch))
        cut = torch.split(order, work.minibatch_size)
        epochs.append([rows[lengths[rows].argsort(stable=True)] for rows in cut])
    return epochs
