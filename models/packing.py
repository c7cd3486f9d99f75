"""Pack several sequences into one row of a pass, so that each attends only to itself."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from vantage.models.sequences import Packing, Sequences


def first_fit_decreasing(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return which sequences share a row of ``capacity`` tokens: the longest first, each into the first row that has room.

    Of equal lengths the earlier comes first, so equal lengths give equal rows. There are at most 11/9 of the fewest
    possible rows, plus one (Johnson 1973; Dósa 2007).

    Raises:
        ValueError: a sequence is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[place]
        if length > capacity:
            raise ValueError(f"a sequence of {length} tokens does not fit a row of {capacity}")
        row = next((row for row, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(place)
        room[row] -= length
    return rows


def pack(sequences: Sequences, rows: Sequence[Sequence[int]]) -> Sequences:
    """Return the sequences, packed into the rows of ``rows``: for each row, its sequences in order.

    Positions restart at every sequence, and at every token of the padding after the last one. From restarting positions,
    without a mask, the models of transformers make masks in which each token attends to its own sequence up to itself, in
    every layer and within its window (`transformers.masking_utils.find_packed_sequence_indices`). `boundaries_hold`
    checks this.
    """
    totals = sequences.known.totals
    width = max(sum(totals[place] for place in row) for row in rows)
    device = sequences.input_ids.device
    input_ids = torch.zeros(len(rows), width, dtype=torch.long, device=device)
    positions = torch.zeros(len(rows), width, dtype=torch.long, device=device)
    row_of, starts = (torch.zeros(len(sequences), dtype=torch.long) for _ in range(2))
    for number, row in enumerate(rows):
        begin = 0
        for place in row:
            end = begin + totals[place]
            input_ids[number, begin:end] = sequences.input_ids[place, : totals[place]]
            positions[number, begin:end] = torch.arange(totals[place], device=device)
            row_of[place], starts[place] = number, begin
            begin = end
    packing = Packing(input_ids, positions, rows=row_of.to(device), starts=starts.to(device))
    return replace(sequences, layout=packing)


def takes_positions(trunk: nn.Module) -> bool:
    """Return whether a model takes the position of each token as input; one with ALiBi (BLOOM) counts by itself."""
    return "position_ids" in inspect.signature(trunk.forward).parameters


def boundaries_hold(*, alone: Tensor, packed: Tensor, joined: Tensor) -> bool:
    """Return whether a sequence after another one in its row has the same results as alone.

    Args:
        alone: log-probabilities of its tokens if it is alone.
        packed: the same after another sequence.
        joined: the same if both are one sequence, which a boundary must prevent.
    """
    return bool((packed - alone).abs().max() <= _SMALL * (joined - alone).abs().max())


_SMALL = 0.01
"""Largest share of the change by another text before, that still counts as rounding; in float32 rounding is a
thousandth of it or less."""
