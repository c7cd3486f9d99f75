"""Refuse files whose columns have the names of a known format, but whose texts would be learnt wrongly."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vantage.tasks.data.columns import RowMapper, WrongValue

if TYPE_CHECKING:
    from vantage.tasks.data.published_formats import Format

_MOST = 0.9
"""Share of the first rows that must show the fault."""
_LEAST_CHARACTERS = 20
"""Length of the shortest prompt that counts; a response may begin with a shorter one by chance."""


_RESPONSES = ("response", "chosen", "rejected", "response_a", "response_b", "responses")

MARKS = ("label", "desirable", "if_chosen", "is_safe")
"""Columns that mark a single answer as good or bad."""


class GarbledRows(ValueError):
    """The rows could be read, and would be learnt wrongly."""


def refuse_garbled(found: "Format", rows: Sequence[Mapping[str, Any]], content: str) -> None:
    """Refuse rows whose texts would be learnt wrongly.

    Raises:
        GarbledRows: the prompts are JSON, the responses repeat them, or some demonstrations are marked bad.
    """
    for mark in MARKS if content == "demonstrations" else ():
        marks = [row.get(mark) for row in rows]
        if _share(map(is_mark, marks)) >= _MOST and any(_is_bad(each) for each in marks):
            raise GarbledRows(
                f"{mark!r} marks some of the answers as bad, and demonstrations would be learnt all alike; write the good ones "
                "into a file of their own, or, if all shall be learnt, map the columns in the recipe under data.NAME.columns"
            )
    prompt = found.columns.get("prompt", "")
    if not _has_rounds(found, rows) and _share(_is_json_list(row.get(prompt)) for row in rows) >= _MOST:
        raise GarbledRows(
            f"the texts of {prompt!r} are lists written as JSON; write the file with messages "
            '([{"role": "user", "content": …}]), or with one text for each prompt and response'
        )
    sides = [found.columns[side] for side in ("chosen", "rejected") if side in found.columns]
    if len(sides) == 2 and _share(_begin_alike(row, prompt, sides) for row in rows) >= _MOST:
        raise GarbledRows(
            f"{' and '.join(map(repr, sides))} begin with the text of {prompt!r}, which would be learnt as part of the response; "
            "cut it off them, or, if it is meant so, map the columns in the recipe under data.NAME.columns"
        )


def is_mark(value: Any) -> bool:
    """Return whether a value means good or bad, and is not a number."""
    return isinstance(value, bool) or (isinstance(value, str) and value.casefold() in ("true", "false"))


def _is_bad(value: Any) -> bool:
    return value is False or (isinstance(value, str) and value.casefold() == "false")


def _share(marks: Any) -> float:
    found = list(marks)
    return sum(found) / len(found) if found else 0.0


def _is_json_list(text: Any) -> bool:
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and bool(value) and all(isinstance(item, str | None) for item in value)


def _has_rounds(found: "Format", rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the responses are such lists too; then each item is a round (``vantage.tasks.data.assembly``)."""
    sides = {column: spec for column, spec in found.columns.items() if column in _RESPONSES}
    return bool(sides) and _share(_are_json_lists(RowMapper(sides), row) for row in rows) >= _MOST


def _are_json_lists(mapper: RowMapper, row: Mapping[str, Any]) -> bool:
    try:
        found = mapper.map(row).values()
    except WrongValue:
        return False
    texts = [text for value in found for text in (value if isinstance(value, list) else [value])]
    return bool(texts) and all(map(_is_json_list, texts))


def _begin_alike(row: Mapping[str, Any], prompt: str, sides: Sequence[str]) -> bool:
    asked = row.get(prompt)
    return (
        isinstance(asked, str)
        and len(asked.strip()) >= _LEAST_CHARACTERS
        and all(
            isinstance(row.get(side), str) and row[side].strip().startswith(asked.strip()) for side in sides
        )
    )
