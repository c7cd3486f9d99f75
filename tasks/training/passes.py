"""Divide a batch into passes of a rank, with rows of similar length together, so that there is little padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from torch import Tensor

from vantage.models.packing import first_fit_decreasing, pack
from vantage.models.parts import Cuts, in_parts
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.training import nonfinite, progress, ranks
from vantage.tasks.training.cuts import (
    READ_AGAIN,
    Lengths,
    alone,
    cut,
    device_here,
    filled,
    overhead_here,
    shared,
)

ENDLESS = 1 << 40
"""An overhead so large that rows are cut only where they have to be."""


@dataclass(frozen=True)
class Pass:
    """Rows of a batch that this rank computes together."""

    rows: list[int]
    weight: float = 1.0
    """Factor of the pass's results; 0 for a pass that only keeps in step with the other ranks."""
    done: int = 0
    """Approximate number of rows of the batch, over all ranks, that are computed before this pass."""
    layout: list[list[int]] | None = None
    """Groups of rows, by their places in ``rows``, that share a row of the pass; None: no rows share one."""
    cuts: Cuts | None = None
    """Parts in which the rows are computed, by their places; None: all at once."""
    is_last: bool = False
    """Whether no other pass over the batch follows, on any rank."""

    def select(self, batch: Sequences) -> Sequences:
        """Return the pass's rows of a batch, in its layout."""
        nonfinite.remember(batch)
        found = batch.select(self.rows)
        if self.cuts is not None:
            return in_parts(found, self.cuts)
        return found if self.layout is None else pack(found, self.layout)

    def put(self, found: Tensor, into: Tensor) -> None:
        """Copy results for these rows, (b, …), into their places in a tensor for all rows, (B, …), which may be wider."""
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
    """Yield this rank's passes over a batch, as many on every rank, the longest rows first; each pass is reported as progress.

    Each row belongs to exactly one rank. Rows of equal length stay in their order.

    Args:
        lengths: tokens of each row's longest sequence.
        limits: the largest size of a pass.
        sequences: number of sequences that go through the model for each row: 2 for a pair, and so on.
        is_divided: whether the caller divides each pass by ``laid_out``, so that rows are only cut by the limits.
    """
    yield from _told(_cut_by_length(lengths, limits, sequences=sequences, is_divided=is_divided))


def passes_of(batch: Sequences, limits: PassLimits) -> Iterator[Pass]:
    """Yield passes over a batch of sequences. If several share a prompt, and it costs less, a pass reads each prompt
    once.

    Then all responses to a prompt are on one rank.
    """
    totals = batch.known.totals
    by_length = _cut_by_length(totals, limits)
    if limits.share_prompts and not ranks.are_sharded() and len(batch):
        lengths = Lengths(batch)
        sharing = _cut_by_prompt(lengths, limits) if lengths.can_share else None
        if sharing is not None and sharing.cost < by_length.cost:
            by_length = sharing
    yield from _told(by_length)


@dataclass(frozen=True)
class _Plan:
    """The passes of all ranks, with the positions of each."""

    of_ranks: list[list[tuple[Pass, int]]]
    cost: int
    """Positions of the rank with the most positions."""


def _cut_by_length(
    lengths: Sequence[int],
    limits: PassLimits,
    *,
    sequences: int | Sequence[int] = 1,
    is_divided: bool = False,
) -> _Plan:
    sizes = np.broadcast_to(np.asarray(sequences, dtype=np.int64), len(lengths))
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    overhead = ENDLESS if is_divided and not ranks.are_sharded() else overhead_here()
    of_ranks, costs = [], []
    for first in range(ranks.world_size()):
        own = longest_first[first :: ranks.world_size()]
        found, done = [], 0
        for part in cut(
            [lengths[row] for row in own], sequences=sizes[own], limits=limits, overhead=overhead
        ):
            rows = sorted(own[part])
            found.append((Pass(rows, done=done), int(sizes[rows].sum()) * lengths[own[part][0]]))
            done += len(rows) * ranks.world_size()
        of_ranks.append(found)
        costs.append(sum(positions + READ_AGAIN[device_here()] for _, positions in found))
    return _Plan(of_ranks, max(costs))


def _cut_by_prompt(lengths: Lengths, limits: PassLimits) -> _Plan:
    """Return a plan with all responses to a prompt on one rank; the longest groups are dealt first."""
    groups: dict[int, list[int]] = {}
    for row, first in enumerate(lengths.first_equal):
        groups.setdefault(first, []).append(row)
    largest_first = sorted(groups.values(), key=lambda rows: -sum(lengths.totals[row] for row in rows))
    of_ranks, costs = [], []
    for first in range(ranks.world_size()):
        own = [row for group in largest_first[first :: ranks.world_size()] for row in group]
        found, done, cost = [], 0, 0
        for rows in filled(lengths, own, limits):
            planned = shared(lengths, rows)
            found.append((Pass(rows, done=done, cuts=planned.cuts), planned.positions))
            done += len(rows) * ranks.world_size()
            cost += planned.cost
        of_ranks.append(found)
        costs.append(cost)
    return _Plan(of_ranks, max(costs))


def packed_passes(lengths: Sequence[int], limits: PassLimits) -> Iterator[Pass]:
    """Yield passes with several rows of the batch packed into each row of a pass, which is as long as the longest.

    Args:
        limits: largest number of rows of a pass, each of which may contain several rows of the batch, and of positions.
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
    plans = [[_packed(groups, lengths) for groups in own] for own in of_ranks]
    yield from _told(_Plan(plans, cost=0))


def _packed(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[Pass, int]:
    """Return a pass whose rows hold these groups, and its positions."""
    rows = [row for group in groups for row in group]
    place_of = {row: place for place, row in enumerate(rows)}
    layout = [[place_of[row] for row in group] for group in groups]
    return Pass(rows, layout=layout), len(groups) * max(
        sum(lengths[row] for row in group) for group in groups
    )


def _told(plan: _Plan) -> Iterator[Pass]:
    """Yield this rank's passes, and report progress for each. After the last pass, report the largest one again: memory that
    runs out later, in the optimiser's step, does so beside the memory of that pass."""
    mine = plan.of_ranks[ranks.rank()]
    sizes = [(len(each.rows), positions) for each, positions in mine]
    count = max(map(len, plan.of_ranks))
    for number, (each, size) in enumerate(zip_longest(in_step([each for each, _ in mine], count), sizes)):
        progress.computing(*(size or (1, 1)))
        yield replace(each, is_last=number + 1 == count)
    if sizes:
        progress.computing(*max(sizes, key=lambda size: size[1]))


def laid_out(sequences: Sequences, limits: PassLimits) -> Sequences:
    """Return sequences of one pass, laid out in the cheapest parts, with each prompt once where that costs less.

    All parts together keep at most as much for the backward pass as one padded pass. With sharded weights, which all
    ranks gather in each pass, the sequences stay in one pass.
    """
    nonfinite.remember(sequences)
    if ranks.are_sharded():
        return sequences
    lengths = Lengths(sequences)
    best = alone(lengths.totals)
    if limits.share_prompts and lengths.can_share:
        best = min(best, shared(lengths, range(len(sequences))), key=lambda planned: planned.cost)
    return sequences if best.num_parts == 1 else in_parts(sequences, best.cuts)


def in_step(mine: list[Pass], count: int) -> list[Pass]:
    """Return as many passes as the rank with the most has: in each pass all ranks gather sharded weights."""
    return mine + [Pass([0], weight=0.0)] * (count - len(mine))
