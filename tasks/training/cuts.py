"""Cut a batch into parts with little padding: rows of similar length together, and a prompt once for all its responses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vantage.models.parts import Cuts
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits

OVERHEAD = {"cpu": 32, "cuda": 4096}
"""Fixed cost of a pass (Python, kernel launches), as the number of positions that could be computed in that time.

CPU: for the built-in tiny model, forward and backward (docs/LOG.md, 2026-11-23). CUDA: 30 ms of launches at 0.5B weights;
in that time an H200 computes about 4,096 positions (7 µs each); not measured."""


READ_AGAIN = {"cpu": 128, "cuda": 4096}
"""Positions that must be saved before prompts are read separately, as measured. Passes are cut with the smaller cost
above, so that there is little padding."""


@dataclass(frozen=True)
class Planned:
    """Plan of a pass: the parts in which it computes its rows, and their cost."""

    cuts: Cuts
    positions: int
    """Positions of all parts, padding included."""

    @property
    def num_parts(self) -> int:
        """Number of forward passes."""
        return len(self.cuts.parts) + len(self.cuts.prompts)

    @property
    def cost(self) -> int:
        """Return the cost of the passes, in positions."""
        return self.positions + self.num_parts * READ_AGAIN[device_here()]


class Lengths:
    """Lengths of a batch's sequences, and which of them share a prompt."""

    def __init__(self, batch: Sequences) -> None:
        self.totals: list[int] = batch.known.totals
        self.responses: list[int] = batch.known.responses
        self.prompts: list[int] = batch.known.prompts
        self.first_equal: list[int] = batch.first_equal_prompts()
        self.can_share = len(set(self.first_equal)) < len(self.first_equal) and min(self.responses) > 0
        """Whether a prompt has several responses; all must have tokens, since a part cannot hold an empty response."""


def alone(totals: Sequence[int]) -> Planned:
    """Return a plan of whole sequences, in parts of similar length."""
    parts, positions = _of_like_length(totals, overhead_here())
    return Planned(Cuts(parts), positions)


def shared(lengths: Lengths, rows: Sequence[int]) -> Planned:
    """Return a plan that reads each prompt once, then the responses, both in parts of similar length.

    Args:
        rows: the sequences; the plan refers to them by their places in this list.
    """
    firsts: dict[int, int] = {}
    for place, row in enumerate(rows):
        firsts.setdefault(lengths.first_equal[row], place)
    places = list(firsts.values())
    overhead = overhead_here() // 2  # rows are about half as long, so padding would be a larger share of them
    of_prompts, of_all = _of_like_length([lengths.prompts[rows[place]] for place in places], overhead)
    parts, positions = _of_like_length([lengths.responses[row] for row in rows], overhead)
    prompts = [[places[each] for each in part] for part in of_prompts]
    return Planned(Cuts(parts, prompts), of_all + positions)


def _of_like_length(lengths: Sequence[int], overhead: int) -> tuple[list[list[int]], int]:
    """Return rows in parts, the longest first, and the number of positions of all parts."""
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    slices = cut([lengths[row] for row in longest_first], limits=UNLIMITED, overhead=overhead)
    parts = [sorted(longest_first[part]) for part in slices]
    return parts, sum(len(part) * max(lengths[row] for row in part) for part in parts)


def filled(lengths: Lengths, rows: Sequence[int], limits: PassLimits) -> list[list[int]]:
    """Return the rows in passes as large as ``limits`` allow; the responses to one prompt are adjacent."""
    order = sorted(
        rows, key=lambda row: (-lengths.prompts[row], lengths.first_equal[row], -lengths.responses[row])
    )
    found: list[list[int]] = []
    for row in order:
        if found and _fits([*found[-1], row], lengths, limits):
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _fits(rows: Sequence[int], lengths: Lengths, limits: PassLimits) -> bool:
    """Return whether one pass may contain these rows; the parts have fewer positions than are counted here."""
    if limits.rows is not None and len(rows) > limits.rows:
        return False
    if limits.tokens is None:
        return True
    prompts = {lengths.first_equal[row]: lengths.prompts[row] for row in rows}
    responses = len(rows) * max(lengths.responses[row] for row in rows)
    return len(prompts) * max(prompts.values()) + responses <= limits.tokens


def overhead_here() -> int:
    """Return the overhead of the device that this process computes on."""
    return OVERHEAD[device_here()]


def device_here() -> str:
    """Return this process's device, as a key of OVERHEAD and READ_AGAIN."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cut(
    lengths: Sequence[int],
    *,
    limits: PassLimits,
    overhead: int,
    sequences: int | Sequence[int] | NDArray[np.int64] = 1,
) -> list[slice]:
    """Return rows, the longest first, in passes that minimise the number of positions plus ``overhead`` for each pass.

    A pass has as many positions as rows times its longest row. Dynamic programming over the end of the last pass; among equal
    costs, the shortest last pass is chosen. A row with more positions than ``limits`` allow is a pass by itself.

    Args:
        sequences: number of sequences per row; only the bound for positions uses it.
    """
    widths = np.asarray(lengths, dtype=np.int64)
    count = len(widths)
    before = np.concatenate(([0], np.cumsum(np.broadcast_to(sequences, count), dtype=np.int64)))
    costs, starts = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        first = 0 if limits.rows is None else max(0, end - limits.rows)
        if limits.tokens is not None:  # the later a pass begins, the fewer positions it has
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
