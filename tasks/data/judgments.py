"""Decide which of two responses a label, or several annotators' labels, prefer."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from vantage.schemas.row_rules import TIE

Side = Literal["first", "second", "tie"]

_NOUNS = ("response", "model", "answer", "output", "assistant", "option", "completion")
_SAID: Mapping[Side, Sequence[str]] = {
    "first": ("a", "first", "left", "a>b", "a>>b", *(f"{noun}{gap}a" for noun in _NOUNS for gap in "_ ")),
    "second": ("b", "second", "right", "b>a", "b>>a", *(f"{noun}{gap}b" for noun in _NOUNS for gap in "_ ")),
    "tie": (
        "tie",
        "tie (bothbad)",
        "tie (both bad)",
        "tie_bothbad",
        "tie_both_bad",
        "both",
        *(f"both{gap}{word}" for gap in ("", " ", "_") for word in ("good", "bad")),
        "neither",
        "equal",
        "same",
        "draw",
        "a=b",
    ),
}
WORDS: Mapping[str, Side] = {word: side for side, words in _SAID.items() for word in words}
"""Text of a label, in lower case → the response that it prefers. The table has no numbers: 1 is the second response if
they are counted from 0, and the first if they are counted from 1."""

_FROM_0 = {"first": ("0",), "second": ("1",)}
_FROM_1 = {"first": ("1",), "second": ("2",)}
_INDICES = ("better_response_id", "choice", "best", "better")
"""Labels that are the position of a response, and no flag (1: the first is preferred)."""


class Undecided(ValueError):
    """Labels or scores that prefer neither response."""


class Unpairable(ValueError):
    """Two conversations were compared as a whole: no prompt has both of their last answers."""

    def __init__(self) -> None:
        super().__init__("two conversations that differ in more than their last answer")


def preferred(labels: Any, names: Mapping[str, Sequence[str]]) -> Literal[0, 1]:
    """Return the place of the response that one label prefers, or most of several annotators' labels.

    Args:
        labels: a label, or a list of them; missing ones do not count.
        names: ``first``, ``second`` and ``tie`` → the labels that mean them; empty: ``WORDS``.

    Raises:
        Undecided: as many prefer one as the other, or all are ties.
        ValueError: a label is not known.
    """
    given = [label for label in (labels if isinstance(labels, list) else [labels]) if label is not None]
    if not given:
        raise ValueError("there is no label")
    named: dict[str, str] = {plain(label): side for side, found in names.items() for label in found}
    known: Mapping[str, str] = named or WORDS
    votes: Counter[str] = Counter()
    for label in given:
        side = known.get(plain(label))
        if side is None:
            raise ValueError(
                f"label {plain(label)[:40]!r} is not known; say in labels which labels mean first, second and tie"
            )
        votes[side] += 1
    if votes["first"] == votes["second"]:
        raise Undecided(TIE)
    return 0 if votes["first"] > votes["second"] else 1


def plain(label: Any) -> str:
    """Return a label in the form for the look-up: in lower case, and a whole number without its decimal point."""
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return str(label).strip().casefold()


def readings(columns: Mapping[str, str]) -> Iterator[Mapping[str, Sequence[str]]]:
    """Yield the possible meanings of numbers and names of columns, without those that would have to be guessed: a
    number may be a flag, or counted from another start."""
    first, label = columns.get("response_a", ""), columns["label"]
    if first.endswith("0") or not first or label in _INDICES:
        yield _FROM_0
    yield _FROM_1
    if first:
        yield {"first": (plain(first),), "second": (plain(columns["response_b"]),)}
