"""Compare the text of a model's card, or of a run's page, with the text that is derived again."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from vantage.ledger.model_card import CARDS, Wording
from vantage.schemas.records.audit import Outcome

_LINK = re.compile(r"(?<!\\)\[((?:[^\[\]\\\n]|\\.)*)\]\([^)\s\[]*(?:\[[^)\s\[\]]*\][^)\s\[]*)?\)")
"""A link in Markdown. An escaped bracket, as in an interval, does not begin a link. The target has at most one pair of
brackets, as in the address of a machine, so that a text of many brackets is read in linear time."""
_STAMP = re.compile(r"(?:Card|Page) (\d{1,9}) of Vantage (\S{1,80})\.")
_SENTENCE = re.compile(r"(?<=[.;:])\s+")
_CUT = "…"
"""Last line of a text that was too long for MLflow."""
_SHORTENED_BY = 2000
"""Most characters by which a text that was cut after a whole line is shorter than MLflow's limit."""
_SHOWN = 160


@dataclass(frozen=True)
class Compared:
    """The result of a comparison."""

    outcome: Outcome
    detail: str


def compare_cards(
    found: str, derived: str, *, limit: int | None = None, wording: Wording = CARDS
) -> Compared:
    """Return whether a card or page contains the sentences that are derived again; the targets of links are not compared.

    Args:
        found: the text that is stored or shown.
        derived: the text that this version writes of the same records.
        limit: number of characters after which the text is cut where it is stored; None: there is no limit.
        wording: the kind of text, and the number of the wording that this version writes.
    """
    name = wording.text.lower()
    theirs, ours = _lines(found), _lines(derived)
    is_cut = limit is not None and theirs[-1:] == [_CUT] and len(found) > limit - _SHORTENED_BY
    if is_cut:
        theirs = theirs[:-1]
    differing = next(
        (
            (one, other)
            for one, other in zip_longest(theirs[: len(ours)], ours[: len(theirs)] if is_cut else ours)
            if one != other
        ),
        None,
    )
    if differing is None:
        added = [line for line in theirs[len(ours) :] if line]
        if not added:
            return Compared("ok", "its beginning, which MLflow keeps" if is_cut else "")
        return Compared("note", f"{len(added)} lines were added below it, from “{_short(added[0])}” on")
    if not set(theirs) & {line for line in ours if line}:
        return Compared("unchecked", f"there is no {name} of Vantage: its text was replaced or removed")
    stamp = _STAMP.search(found)
    if stamp is None or int(stamp[1]) != wording.number:
        version = (
            f"an earlier version, which did not number its {name}s"
            if stamp is None
            else f"Vantage {stamp[2]}"
        )
        number = "" if stamp is None else f" ({name} {stamp[1]}; this version writes {name} {wording.number})"
        return Compared("unchecked", f"it could not be compared: it was written by {version}{number}")
    return Compared("wrong", _first_difference(*differing))


_BEST_FIRST: tuple[Outcome, ...] = ("ok", "note", "unchecked", "wrong")


def best(results: Iterable[Compared]) -> Compared:
    """Return the best comparison of one text with each text that it may be; of equally good ones the first.

    Stops at the first comparison that agrees, since every further one would derive another text.
    """
    made = []
    for each in results:
        made.append(each)
        if each.outcome == "ok":
            break
    return min(made, key=lambda each: _BEST_FIRST.index(each.outcome))


def _lines(text: str) -> list[str]:
    """Return the lines of a card that have text, without the targets of links and the version of its wording."""
    plain = _LINK.sub(r"\1", text.replace("\r\n", "\n"))
    lines = [line.rstrip() for line in plain.split("\n")]
    return [line for line in lines if line and _STAMP.fullmatch(line) is None]


def _first_difference(one: str | None, other: str | None) -> str:
    """Return the first sentence of two lines that differs."""
    if one is None:
        return f"“{_short(other or '')}” is absent"
    if other is None:
        return f"it has “{_short(one)}”, which is not derived from the records"
    theirs, ours = next(
        pair for pair in zip_longest(_sentences(one), _sentences(other), fillvalue="") if pair[0] != pair[1]
    )
    return f"it has “{_short(theirs)}”, and derived from the records it is “{_short(ours)}”"


def _sentences(line: str) -> Sequence[str]:
    return [line] if line.startswith("|") else list(_parts(line))


def _parts(line: str) -> Iterator[str]:
    yield from _SENTENCE.split(line)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
