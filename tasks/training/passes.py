"""Which rows of a batch a rank computes together: those of like length, so that little is padded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.packing import first_fit_decreasing, pack
from models.sequences import Sequences
from schemas.recipe.pass_limits import UNLIMITED, PassLimits
from tasks.training import progress, ranks

OVERHEAD = {"cpu": 32, "cuda": 4096}
"""Positions that a pass would compute in the time that it takes however few rows it has (Python, kernel launches).

CPU: of the built-in tiny model, forward and backward (docs/LOG.md, 2026-11-23). CUDA: 30 ms of launches at 0.5B weights,
which an H200 computes in about 7 µs a position; not measured."""
ENDLESS = 1 << 40
"""An overhead with which rows are cut only where they have to be."""


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


def passes(
    lengths: Sequence[int],
    limits: PassLimits,
    *,
    sequences: int | Sequence[int] = 1,
    is_divided: bool = False,
) -> Iterator[Pass]:
    """This rank's passes over a batch, as many on every rank, the longest rows first; progress tells of each as it comes.

    Each row is of exactly one rank. Rows of equal length stay in their order.

    Args:
        lengths: tokens of each row, of its longest sequence.
        limits: the most that a pass has.
        sequences: that go through the model for each row: 2 for a pair, and so on.
        is_divided: the caller computes a pass by ``in_parts_of_like_length``, so that the limits alone cut.
    """
    sizes = np.broadcast_to(np.asarray(sequences, dtype=np.int64), len(lengths))
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    of_ranks = [longest_first[first :: ranks.world_size()] for first in range(ranks.world_size())]
    overhead = ENDLESS if is_divided and not ranks.are_sharded() else _overhead()
    cuts = [
        cut([lengths[row] for row in rows], sequences=sizes[rows], limits=limits, overhead=overhead)
        for rows in of_ranks
    ]
    mine, done = [], 0
    for part in cuts[ranks.rank()]:
        rows = sorted(of_ranks[ranks.rank()][part])
        mine.append(Pass(rows, done=done))
        done += len(rows) * ranks.world_size()
    found = in_step(mine, max(map(len, cuts)))
    widths = [max(lengths[row] for row in each.rows) for each in found]
    tokens = [int(sizes[each.rows].sum()) * width for each, width in zip(found, widths, strict=True)]
    yield from _told(found, tokens)


def packed_passes(lengths: Sequence[int], limits: PassLimits) -> Iterator[Pass]:
    """The same with several rows of the batch side by side in each row of a pass, which is as long as the longest.

    Args:
        limits: the most that a pass has: rows, each of which may hold several of the batch, and their positions.
    """
    of_ranks = []
    longest = max(lengths)
    capacity = longest if limits.tokens is None else min(longest, limits.tokens)
    for first in range(ranks.world_size()):
        own = range(first, len(lengths), ranks.world_size())
        alone = [[[row]] for row in own if lengths[row] > capacity]
        others = [row for row in own if lengths[row] <= capacity]
        places = first_fit_decreasing([lengths[row] for row in others], capacity=capacity)
        step = limits.rows_of(capacity, len(places))
        groups = [[others[place] for place in group] for group in places]
        of_ranks.append([*alone, *(groups[start : start + step] for start in range(0, len(groups), step))])
    mine = []
    for groups in of_ranks[ranks.rank()]:
        rows = [row for group in groups for row in group]
        place_of = {row: place for place, row in enumerate(rows)}
        mine.append(Pass(rows, layout=[[place_of[row] for row in group] for group in groups]))
    found, tokens = in_step(mine, max(map(len, of_ranks))), []
    for each in found:
        laid = [[each.rows[place] for place in group] for group in each.layout or [[0]]]
        tokens.append(len(laid) * max(sum(lengths[row] for row in group) for group in laid))
    yield from _told(found, tokens)


def _told(found: Sequence[Pass], tokens: Sequence[int]) -> Iterator[Pass]:
    """The passes, with progress told of each; after the last, of the largest again: memory that runs out later, in the
    optimiser's step, does so beside what that one has taken."""
    sizes = [(len(each.rows), positions) for each, positions in zip(found, tokens, strict=True)]
    for each, size in zip(found, sizes, strict=True):
        progress.computing(*size)
        yield each
    if sizes:
        progress.computing(*max(sizes, key=lambda size: size[1]))


def in_parts_of_like_length(
    sequences: Sequences, compute: Callable[[Sequences, list[int]], Tensor]
) -> Tensor:
    """What ``compute`` finds of each row, (B,) or (B, T), from rows of like length together; for losses that compare rows.

    Of all parts what the backward pass needs is kept, which is no more than that of one padded pass. Sharded weights are
    gathered by all ranks in each pass, so there it is one pass.

    Args:
        compute: from some of the rows, and which they are (in their order), to a row of numbers for each, (b,) or (b, t);
            missing columns become 0.
    """
    every = list(range(len(sequences)))
    if ranks.are_sharded():
        return compute(sequences, every)
    lengths = sequences.total_lengths.tolist()
    longest_first = sorted(every, key=lambda row: -lengths[row])
    cuts = cut([lengths[row] for row in longest_first], limits=UNLIMITED, overhead=_overhead())
    if len(cuts) == 1:
        return compute(sequences, every)
    parts = [sorted(longest_first[part]) for part in cuts]
    found = [compute(sequences.select(rows), rows) for rows in parts]
    if found[0].dim() > 1:  # shorter rows may have fewer columns
        width = max(each.shape[1] for each in found)
        found = [nn.functional.pad(each, (0, width - each.shape[1])) for each in found]
    places = torch.tensor([row for rows in parts for row in rows], device=found[0].device)
    return torch.cat(found)[places.argsort()]


def _overhead() -> int:
    return OVERHEAD["cuda" if torch.cuda.is_available() else "cpu"]


def in_step(mine: list[Pass], count: int) -> list[Pass]:
    """As many passes as the rank that has most: sharded weights are gathered in each pass by all ranks."""
    return mine + [Pass([0], weight=0.0)] * (count - len(mine))


def cut(
    lengths: Sequence[int],
    *,
    limits: PassLimits,
    overhead: int,
    sequences: int | Sequence[int] | NDArray[np.int64] = 1,
) -> list[slice]:
    """Rows, the longest first, in passes such that all positions, and ``overhead`` for each pass, are fewest.

    A pass has as many positions as rows times its longest row. By dynamic programming over the end of the last pass; of
    equal costs, that with the shortest last pass. A row that has more positions by itself than ``limits`` allow is a pass.

    Args:
        sequences: of each row; read by the bound for positions alone.
    """
    widths = np.asarray(lengths, dtype=np.int64)
    count = len(widths)
    before = np.concatenate(([0], np.cumsum(np.broadcast_to(sequences, count), dtype=np.int64)))
    costs, starts = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        first = 0 if limits.rows is None else max(0, end - limits.rows)
        if limits.tokens is not None:  # positions fall as the pass begins later
            positions = (before[end] - before[first:end]) * widths[first:end]
            first = min(end - 1, first + int((positions > limits.tokens).sum()))
        of_start = costs[first:end] + np.arange(end - first, 0, -1) * widths[first:end] + overhead
        best = end - 1 - int(of_start[::-1].argmin())
        costs[end], starts[end] = of_start[best - first], best
    found, end = [], count
    while end > 0:
        found.append(slice(int(starts[end]), end))
        end = int(starts[end])
    return found[::-1]
