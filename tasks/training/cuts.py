"""Where a batch is cut so that little is computed for nothing: rows of like length together, a prompt once for its responses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vantage.models.parts import Cuts
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits

OVERHEAD = {"cpu": 32, "cuda": 4096}
"""Positions that a pass would compute in the time that it takes however few rows it has (Python, kernel launches).

CPU: of the built-in tiny model, forward and backward (docs/LOG.md, 2026-11-23). CUDA: 30 ms of launches at 0.5B weights,
which an H200 computes in about 7 µs a position; not measured."""


READ_AGAIN = {"cpu": 128, "cuda": 4096}
"""The same, as it was measured: what has to be saved where prompts are read apart. A pass is cut as if it took less, so that
little is padded."""


@dataclass(frozen=True)
class Planned:
    """How a pass computes its rows, and what that takes."""

    cuts: Cuts
    positions: int
    """That all parts have, padding included."""

    @property
    def num_parts(self) -> int:
        """Forward passes."""
        return len(self.cuts.parts) + len(self.cuts.prompts)

    @property
    def cost(self) -> int:
        """Return the cost of the passes, in positions."""
        return self.positions + self.num_parts * READ_AGAIN[device_here()]


class Lengths:
    """The lengths of a batch's sequences, and which of them have one prompt."""

    def __init__(self, batch: Sequences) -> None:
        self.totals: list[int] = batch.known.totals
        self.responses: list[int] = batch.known.responses
        self.prompts: list[int] = batch.known.prompts
        self.first_equal: list[int] = batch.first_equal_prompts()
        self.can_share = len(set(self.first_equal)) < len(self.first_equal) and min(self.responses) > 0
        """Whether a prompt has several responses; a response without a token is none that a part could hold."""


def alone(totals: Sequence[int]) -> Planned:
    """Return whole sequences, in parts of like length."""
    parts, positions = _of_like_length(totals, overhead_here())
    return Planned(Cuts(parts), positions)


def shared(lengths: Lengths, rows: Sequence[int]) -> Planned:
    """Return each prompt once, then the responses, both in parts of like length.

    Args:
        rows: which sequences; the plan names them by their places in it.
    """
    firsts: dict[int, int] = {}
    for place, row in enumerate(rows):
        firsts.setdefault(lengths.first_equal[row], place)
    places = list(firsts.values())
    overhead = (
        overhead_here() // 2
    )  # rows are about half as long, and padding is to be as small a share of them
    of_prompts, of_all = _of_like_length([lengths.prompts[rows[place]] for place in places], overhead)
    parts, positions = _of_like_length([lengths.responses[row] for row in rows], overhead)
    prompts = [[places[each] for each in part] for part in of_prompts]
    return Planned(Cuts(parts, prompts), of_all + positions)


def _of_like_length(lengths: Sequence[int], overhead: int) -> tuple[list[list[int]], int]:
    """Return rows in parts, the longest first, and the positions that these have."""
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    slices = cut([lengths[row] for row in longest_first], limits=UNLIMITED, overhead=overhead)
    parts = [sorted(longest_first[part]) for part in slices]
    return parts, sum(len(part) * max(lengths[row] for row in part) for part in parts)


def filled(lengths: Lengths, rows: Sequence[int], limits: PassLimits) -> list[list[int]]:
    """Return the rows in passes that hold as many as ``limits`` allow, the responses to one prompt side by side."""
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
    """Return whether one pass may have these rows; parts of like length have fewer positions than are counted here."""
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
    """Return the name that OVERHEAD and READ_AGAIN give this process's device."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cut(
    lengths: Sequence[int],
    *,
    limits: PassLimits,
    overhead: int,
    sequences: int | Sequence[int] | NDArray[np.int64] = 1,
) -> list[slice]:
    """Return rows, the longest first, in passes such that all positions, and ``overhead`` for each pass, are fewest.

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
