"""Which rows are set apart: decided by a hash of the prompt, so that no prompt stands on two sides."""

import hashlib
from collections import Counter
from collections.abc import Sequence

from schemas.recipe import Split

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)


class TooFewRows(ValueError):
    """A dataset that cannot give what ``split`` asks for and still train."""


def prompt_position(prompt: str) -> float:
    """A prompt's place in [0, 1), the same for prompts that are alike but for case and white space."""
    alike = " ".join(prompt.casefold().split())
    return int.from_bytes(hashlib.sha256(alike.encode()).digest()[:8], "big") / 2**64


def assign_splits(prompts: Sequence[str], split: Split) -> list[str]:
    """The side of every row: from position 0 up first ``test``, then ``validation``, the rest ``train``.

    A share is a stretch of the positions themselves, and therefore the same in every dataset; a number is reached
    by taking whole prompts in the order of their positions.

    Raises:
        TooFewRows: a side, or training, would be left without rows.
    """
    positions = [prompt_position(prompt) for prompt in prompts]
    rows_at = Counter(positions)
    ordered = sorted(rows_at)
    test_end = _end_of(split.test, start=0.0, ordered=ordered, rows_at=rows_at)
    validation_end = _end_of(split.validation, start=test_end, ordered=ordered, rows_at=rows_at)

    sides = [TEST if p < test_end else VALIDATION if p < validation_end else TRAIN for p in positions]
    present = Counter(sides)
    for side, asked in ((TEST, split.test), (VALIDATION, split.validation), (TRAIN, "the rest")):
        if not present[side]:
            raise TooFewRows(
                f"split.{side}={asked} leaves no row for {side}: there are {len(prompts)} rows with {len(ordered)} "
                "different prompts; give more data, or other shares"
            )
    return sides


def _end_of(size: int | float, *, start: float, ordered: Sequence[float], rows_at: Counter[float]) -> float:
    if isinstance(size, float):
        return start + size
    taken = 0
    for position in ordered:
        if position < start:
            continue
        if taken >= size:
            return position
        taken += rows_at[position]
    return 1.0
