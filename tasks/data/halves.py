"""Halves of the prompts of a dataset, on which members of an ensemble are trained."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from vantage.tasks.data.rows import Row, row_batches
from vantage.tasks.data.splits import alike_text


class EmptyHalf(ValueError):
    """A half of the prompts in which a dataset has no row."""


def is_in_half(prompt: str, half: int) -> bool:
    """Return whether a prompt is in a half of the prompts: 1 and 2 are those of one division, 3 and 4 those of another, and so on.

    Prompts that are alike but for case and white space are in one half. Divisions are independent of each other and of the splits.
    """
    division, side = divmod(half - 1, 2)
    return hashlib.sha256(f"half {division}:{alike_text(prompt)}".encode()).digest()[0] % 2 == side


def rows_of_half(folder: Path, split: str, half: int | None, *, at_once: int) -> Iterator[list[Row]]:
    """Yield the rows of one half of the prompts, or with None of all, as many of the file as ``at_once`` at a time.

    Raises:
        EmptyHalf: the half has no rows.
    """
    found, num_rows = 0, 0
    for rows in row_batches(folder, split, at_once):
        kept = rows if half is None else [row for row in rows if is_in_half(row["prompt"], half)]
        num_rows, found = num_rows + len(rows), found + len(kept)
        if kept:
            yield kept
    if half is not None and not found:
        raise EmptyHalf(
            f"half={half} of the {num_rows} rows has none: their prompts are too few, or the same; give more data, or leave half "
            "out (members: by: seed)"
        )
