"""Divide rows into training, validation and test by a hash of the prompt, so that no prompt is on two sides."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # importing pydantic is half of the start-up time of the process that reads files
    from vantage.schemas.recipe.inputs import Shares, Split

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)


class TooFewRows(ValueError):
    """A dataset is too small for its ``split`` to leave rows for training."""


def prompt_position(prompt: str) -> float:
    """Return a prompt's place in [0, 1), equal for prompts that differ only in case and white space."""
    return int.from_bytes(hashlib.sha256(alike_text(prompt).encode()).digest()[:8], "big") / 2**64


def alike_text(prompt: str) -> str:
    """Return the prompt without case and repeated white space."""
    return " ".join(prompt.casefold().split())


def side_of(prompt: str, shares: "Shares") -> str:
    """Return the side of a prompt in every dataset: from position 0 up ``test``, then ``validation``, then ``train``."""
    return _side_at(prompt_position(prompt), shares)


def _side_at(position: float, shares: "Shares") -> str:
    if position < shares.test:
        return TEST
    return VALIDATION if position < shares.test + shares.validation else TRAIN


def size_of(split: "Split", shares: "Shares", side: str) -> int | float:
    """Return the number of rows of a held-out side, or their share of all rows."""
    size, share = getattr(split, side), getattr(shares, side)
    return size if isinstance(size, int | float) else float(share)


def split_by_shares(positions: Sequence[float], split: "Split", shares: "Shares") -> list[str | None]:
    """Return the side of every row by the position of its prompt and ``shares``; None for held-out rows beyond the number
    in ``split``.

    Rows with None are neither measured nor trained on: another dataset may hold them out. A number of rows is reached by taking
    whole prompts in the order of their positions.

    Raises:
        TooFewRows: a side has fewer rows than required, or none.
    """
    sides: list[str | None] = [_side_at(position, shares) for position in positions]
    for side, size, share in (
        (TEST, split.test, shares.test),
        (VALIDATION, split.validation, shares.validation),
    ):
        if not isinstance(size, int):
            continue
        held_out = np.fromiter(
            (p for p, of in zip(positions, sides, strict=True) if of == side), dtype=np.float64
        )
        if len(held_out) < size:
            raise TooFewRows(
                f"split.{side}={size} is more than the {len(held_out)} rows of {len(positions)} that the {side} share of "
                f"{share:g} holds; ask for fewer, or name a larger share as split.{side} of one of the datasets"
            )
        end = _end_of(size, start=0.0, ordered=np.sort(held_out))
        sides = [
            None if of == side and position >= end else of
            for position, of in zip(positions, sides, strict=True)
        ]
    _refuse_empty_sides(sides, positions, {TEST: shares.test, VALIDATION: shares.validation})
    return sides


def split_alone(positions: Sequence[float], split: "Split", shares: "Shares") -> list[str]:
    """Return the side of every row by the position of its prompt, for a dataset that shares prompts with no other: all
    rows are used.

    A share is a range of positions. A number of rows is reached by taking whole prompts in the order of their positions, also
    beyond the side's share if necessary.

    Raises:
        TooFewRows: a side, or training, would be left without rows.
    """
    sizes = {side: size_of(split, shares, side) for side in (TEST, VALIDATION)}
    ordered = np.sort(np.asarray(positions))
    test_end = _end_of(sizes[TEST], start=0.0, ordered=ordered)
    validation_end = _end_of(sizes[VALIDATION], start=test_end, ordered=ordered)

    sides = [TEST if p < test_end else VALIDATION if p < validation_end else TRAIN for p in positions]
    _refuse_empty_sides(sides, positions, sizes)
    return sides


def _refuse_empty_sides(
    sides: Sequence[str | None], positions: Sequence[float], sizes: Mapping[str, int | float]
) -> None:
    for side, asked in {**sizes, TRAIN: "the rest"}.items():
        if side not in sides:
            raise TooFewRows(
                f"split.{side}={asked} leaves no row for {side}: there are {len(positions)} rows with "
                f"{len(set(positions))} different prompts; give more data, or other shares"
            )


def _end_of(size: int | float, *, start: float, ordered: Any) -> float:
    """Return the end of a side that begins at ``start``; for a number of rows, it is after the last row of its last prompt.

    Args:
        ordered: (N,) the positions of all rows, in ascending order.
    """
    if isinstance(size, float):
        return start + size
    last = np.searchsorted(ordered, start) + size - 1
    if last >= len(ordered):
        return 1.0
    end = np.searchsorted(ordered, ordered[last], side="right")
    return 1.0 if end == len(ordered) else float(ordered[end])
