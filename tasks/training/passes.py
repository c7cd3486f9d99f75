"""Which rows of a batch a rank computes together: those of like length, so that little is padded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.packing import first_fit_decreasing, pack
from models.sequences import Sequences
from tasks.training import progress, ranks

OVERHEAD = {"cpu": 32, "cuda": 4096}
"""Positions that a pass would compute in the time that it takes however few rows it has (Python, kernel launches).

CPU: of the built-in tiny model, forward and backward (docs/LOG.md, 2026-11-23). CUDA: 30 ms of launches at 0.5B weights,
which an H200 computes in about 7 µs a position; not measured."""


@dataclass(frozen=True)
class Pass:
    """Rows of a batch that this rank computes together."""

    rows: list[int]
    weight: float = 1.0
    """0 of a pass that only keeps step with the other ranks: what it finds is multiplied by that."""
    done: int = 0
    """Rows of the batch, of all ranks, that are computed before it; about."""
    layout: list[list[int]] | None = None
    """Which of them, by their places in ``rows``, share a row of the pass; None: none."""

    def select(self, batch: Sequences) -> Sequences:
        """These rows."""
        found = batch.select(self.rows)
        return found if self.layout is None else pack(found, self.layout)

    def put(self, found: Tensor, into: Tensor) -> None:
        """What was found for these rows, (b, …), into their places of a tensor of all rows, (B, …), which may be wider."""
        if self.weight and found.dim() > 1:
            into[self.rows, : found.shape[1]] = found.to(into.device, into.dtype)
        elif self.weight:
            into[self.rows] = found.to(into.device, into.dtype)


def passes(lengths: Sequence[int], size: int | None) -> Iterator[Pass]:
    """This rank's passes over a batch, as many on every rank, the longest rows first; progress tells of each as it comes.

    Each row is of exactly one rank. Rows of equal length stay in their order.

    Args:
        lengths: tokens of each row.
        size: most rows of one pass; None: any number.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    of_ranks = [longest_first[first :: ranks.world_size()] for first in range(ranks.world_size())]
    overhead = OVERHEAD["cuda" if torch.cuda.is_available() else "cpu"]
    cuts = [cut([lengths[row] for row in rows], size=size, overhead=overhead) for rows in of_ranks]
    mine, done = [], 0
    for part in cuts[ranks.rank()]:
        rows = sorted(of_ranks[ranks.rank()][part])
        mine.append(Pass(rows, done=done))
        done += len(rows) * ranks.world_size()
    for each in in_step(mine, max(map(len, cuts))):
        progress.computing(len(each.rows))
        yield each


def packed_passes(lengths: Sequence[int], size: int | None) -> Iterator[Pass]:
    """The same with several rows of the batch side by side in each row of a pass, which is as long as the longest.

    Args:
        size: most rows of one pass, each of which may hold several of the batch; None: all.
    """
    of_ranks = []
    for first in range(ranks.world_size()):
        own = range(first, len(lengths), ranks.world_size())
        places = first_fit_decreasing([lengths[row] for row in own], capacity=max(lengths))
        step = size or len(places) or 1
        groups = [[own[place] for place in group] for group in places]
        of_ranks.append([groups[start : start + step] for start in range(0, len(groups), step)])
    mine = []
    for groups in of_ranks[ranks.rank()]:
        rows = [row for group in groups for row in group]
        place_of = {row: place for place, row in enumerate(rows)}
        mine.append(Pass(rows, layout=[[place_of[row] for row in group] for group in groups]))
    for each in in_step(mine, max(map(len, of_ranks))):
        progress.computing(len(each.layout or each.rows))
        yield each


def in_step(mine: list[Pass], count: int) -> list[Pass]:
    """As many passes as the rank that has most: sharded weights are gathered in each pass by all ranks."""
    return mine + [Pass([0], weight=0.0)] * (count - len(mine))


def cut(lengths: Sequence[int], *, size: int | None, overhead: int) -> list[slice]:
    """Rows, the longest first, in passes such that all positions, and ``overhead`` for each pass, are fewest.

    A pass has as many positions as rows times its longest row. By dynamic programming over the end of the last pass; of
    equal costs, that with the shortest last pass.
    """
    widths = np.asarray(lengths, dtype=np.int64)
    count = len(widths)
    costs, starts = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        first = 0 if size is None else max(0, end - size)
        of_start = costs[first:end] + np.arange(end - first, 0, -1) * widths[first:end] + overhead
        best = end - 1 - int(of_start[::-1].argmin())
        costs[end], starts[end] = of_start[best - first], best
    found, end = [], count
    while end > 0:
        found.append(slice(int(starts[end]), end))
        end = int(starts[end])
    return found[::-1]
