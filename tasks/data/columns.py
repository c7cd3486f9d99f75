"""Read our columns from a row of a user's file: names, paths into nested values, and templates of text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from vantage.schemas.conversations import Message
from vantage.tasks.data.conversations import (
    read_conversation,
    read_history,
    turns_in_text,
    without_nulls,
)

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")

_SHOWN_CHARACTERS = 200

Row = Mapping[str, Any]


class MissingColumn(ValueError):
    """A mapping names a column that the rows do not have."""


class WrongValue(ValueError):
    """A row's value has the wrong kind for its column."""

    def __init__(self, column: str, reason: str, *, spec: str, row: Row, wanted: str = "") -> None:
        super().__init__(f"columns.{column}={spec!r}: {reason}{wanted}")
        self.reason = f"{column}: {reason.partition(';')[0]}"
        """The reason, which is the same for all rows with this fault."""
        self.shown = short(row)
        """The row, shortened."""


class RowMapper:
    """Turns the rows of one file into our columns.

    A value that one row lacks, or holds as null, is missing in that row. A value that every row lacks means a wrong mapping.
    """

    def __init__(
        self,
        columns: Mapping[Any, str],
        *,
        optional: Sequence[str] = (),
        is_text: bool = False,
        keeps_turns: bool = False,
    ) -> None:
        """
        Args:
            columns: our column → a name, a path or a template.
            optional: our columns that the file may have under our names.
            is_text: the file contains only text, so numbers are read from it.
            keeps_turns: leave a list of messages as a list of ``Message`` instead of turning it into text.
        """
        self.columns: dict[str, str] = {**columns, **{column: column for column in optional}}
        self._optional = frozenset(optional)
        self._is_text = is_text
        self._keeps_turns = keeps_turns
        self._found: set[str] = set()
        self._lacking: dict[str, MissingColumn] = {}

    def map(self, row: Row) -> dict[str, Any]:
        """Return our column → its value in ``row``; None where the row has none.

        Most columns are text; ``_NOT_TEXT`` lists the others.

        Raises:
            WrongValue: a value has the wrong kind.
            ValueError: a column that is not text has a template.
        """
        try:
            return {
                ours: self._value_at(row, spec, ours) if ours in _NOT_TEXT else self._text_at(row, spec, ours)
                for ours, spec in self.columns.items()
            }
        except ValueError:
            self._found.update(self._paths_in(row))  # some paths may occur only in this row
            raise

    def paths(self) -> list[str]:
        """Return the parts of a row that the mapping reads."""
        return [path for spec in self.columns.values() for path in _paths(spec)]

    def _paths_in(self, row: Row) -> Iterator[str]:
        """Yield those parts that the mapping reads and the row has."""
        for path in self.paths():
            with suppress(MissingColumn):
                _follow(row, path, path)
                yield path

    def never_found(self) -> list[MissingColumn]:
        """Return the errors of the mapping: each part of it that no row has had so far."""
        paths = [
            path for ours, spec in self.columns.items() if ours not in self._optional for path in _paths(spec)
        ]
        return [self._lacking[path] for path in paths if path in self._lacking and path not in self._found]

    def absent(self) -> list[str]:
        """Return the optional columns that no row has had so far."""
        return [column for column in self.columns if column in self._optional and column not in self._found]

    def _value_at(self, row: Row, spec: str, ours: str) -> Any:
        kind, read = _NOT_TEXT[ours]
        if "{" in spec:
            raise ValueError(
                f"columns.{ours}={spec!r} is a template, which makes a text, and {ours} is {kind}; name a column of the file"
            )
        value = self._follow(row, spec, ours)
        try:
            if self._is_text and read in (as_number, as_numbers):
                value = _numbers_in(value)
            return None if value is None else read(value)
        except ValueError as error:
            wanted = f"; {ours} is {kind}{_hint(ours)}"
            raise WrongValue(ours, str(error), spec=spec, row=row, wanted=wanted) from error

    def _text_at(self, row: Row, spec: str, ours: str) -> str | list[Message] | None:
        try:
            if "{" in spec:
                return self._filled(row, spec, ours)
            value = self._follow(row, spec, ours)
            if isinstance(value, bool | int | float) and ours not in ("answer", "subgroup"):
                raise ValueError(_not_text(value))
            if self._keeps_turns and ours in _MAY_BE_TURNS:
                turns = turns_in_text(value) if isinstance(value, str) else None
                if turns is not None or isinstance(value, list):
                    return turns or read_conversation(value)
            return whole_text(as_text(value))
        except MissingColumn:
            raise
        except ValueError as error:
            raise WrongValue(ours, str(error), spec=spec, row=row) from error

    def _filled(self, row: Row, template: str, ours: str) -> str | None:
        filled = _PLACEHOLDER.sub(lambda match: as_text(self._follow(row, match[1], ours)) or "", template)
        # Lines of a template that come out empty (for example an optional input) are left out.
        return whole_text("\n".join(line for line in filled.splitlines() if line.strip()))

    def _follow(self, row: Row, path: str, ours: str) -> Any:
        try:
            value = _follow(row, path, ours)
        except MissingColumn as error:
            self._lacking.setdefault(path, error)
            return None
        self._found.add(path)
        return value


def _paths(spec: str) -> list[str]:
    return _PLACEHOLDER.findall(spec) if "{" in spec else [spec]


def _follow(row: Row, path: str, ours: str) -> Any:
    """Return the value at ``a.b.0``: keys of mappings, indices of lists; ``a.*.b`` is the list of all items' ``b``.

    ``a_[0-9]`` or ``a_*`` in place of a key is the list of the values of all such keys, in the order of their names.
    A column's own name may hold dots.
    """
    if path in row:
        return row[path]
    value: Any = row
    parts = path.split(".")
    for number, part in enumerate(parts):
        if value is None:
            return None
        items = _items(value, part)
        if items is not None:
            rest = ".".join(parts[number + 1 :])
            return [_follow({"": item}, f".{rest}" if rest else "", ours) for item in items]
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif (
            isinstance(value, list) and part.lstrip("-").isdecimal() and -len(value) <= int(part) < len(value)
        ):
            value = value[int(part)]
        else:
            raise MissingColumn(
                f"columns.{ours}={path!r}: there is no {part!r} in the data; "
                f"it has: {', '.join(map(str, _keys(value)))}{_hint(ours)}"
            )
    return value


def _items(value: Any, part: str) -> list[Any] | None:
    """Return all items of a list for ``*``, or the values of all keys that a pattern matches; None: ``part`` is a single
    key."""
    if part == "*" and isinstance(value, list):
        return value
    if not is_pattern(part) or not isinstance(value, Mapping) or part in value:
        return None
    keys = [key for key in value if fnmatchcase(str(key), part)]
    return [value[key] for key in sorted(keys, key=lambda key: (len(key), key))] or None


def is_pattern(part: str) -> bool:
    """Return whether a part of a path matches several keys."""
    return any(character in part for character in "*?[")


def short(row: Row) -> str:
    """Return the row, shortened."""
    try:
        return repr(dict(row))[:_SHOWN_CHARACTERS]
    except RecursionError:
        return "a row that is nested too deeply to be shown"


def whole_text(text: str | None) -> str | None:
    """Return the text, if all of its characters can be written in UTF-8."""
    try:
        if text is not None:
            text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a character (a lone surrogate) is not text") from None
    return text


def _numbers_in(value: Any) -> Any:
    """Return a text as the number that it holds, and a list of such texts as a list of numbers; return other values
    unchanged."""
    if isinstance(value, list):
        return list(map(_numbers_in, value))
    return _number_in(value) if isinstance(value, str) else value


def _number_in(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise ValueError("a text that is no number")
    return float(text)


def _hint(ours: str) -> str:
    """Return the columns that people often have instead of ranks, and how to turn them into ranks."""
    if ours != "ranks":
        return ""
    return ". Ranks are positions: 1 is the best, and equal ranks tie; of scores, where higher is better, give −score"


def _keys(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return sorted(value)
    return [f"items 0 to {len(value) - 1}"] if isinstance(value, list) and value else ["nothing"]


def as_text(value: Any) -> str | None:
    """Return the text of a value: a string, a number, one chat message, or a list of messages.

    For one message, and for a list with one, it is the content. For a list that ends in an assistant's message, as
    preference files have in ``chosen``, it is that last content. Other lists become ``Role: content`` lines.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Mapping):
        return _content(value)
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        if len(value) == 1 or _role(value[-1]) in ("assistant", "gpt"):
            return _content(value[-1])
        return "\n\n".join(f"{_role(message).capitalize()}: {_content(message)}" for message in value)
    raise ValueError(_not_text(value))


def _not_text(value: Any) -> str:
    if isinstance(value, bytes):
        return "bytes are not text; write the column as strings in UTF-8"
    return f"a value of type {type(value).__name__} is not text; name the part that is (for example a.b.0)"


def _content(message: Mapping[str, Any]) -> str:
    for key in ("content", "value", "text"):
        if isinstance(message.get(key), str):
            return str(message[key])
    raise ValueError(
        f"a message has its text in content, value or text; this one has {', '.join(map(str, message))}"
    )


def _role(message: Mapping[str, Any]) -> str:
    return str(message.get("role") or message.get("from") or "user")


def as_number(value: Any) -> float | None:
    """Return a number. A text that looks like a number is not one, so that a wrong column is not read by accident."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a value of type {type(value).__name__} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("an integer of more than 308 digits is too large") from None


def as_texts(value: Any) -> list[str | None]:
    """Return a list of texts, each read by ``as_text``, except that a number is not a text."""
    items = _as_list(value)
    for item in items:
        if isinstance(item, bool | int | float):
            raise ValueError(_not_text(item))
    return [whole_text(as_text(item)) for item in items]


def as_numbers(value: Any) -> list[float | None]:
    """Return a list of numbers."""
    return [as_number(item) for item in _as_list(value)]


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a value of type {type(value).__name__} is not a list")
    return value


def as_label(value: Any) -> Any:
    """Return a label, or a list of several annotators' labels."""
    if all(
        isinstance(item, str | int | float | None) for item in (value if isinstance(value, list) else [value])
    ):
        return value
    raise ValueError(f"a value of type {type(value).__name__} is not a label")


def as_tools(value: Any) -> list[Any] | None:
    """Return the tools of a row: a list of definitions, or JSON of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise ValueError("a text that is no JSON") from None
    if value is None or isinstance(value, list):
        return without_nulls(value) or None
    raise ValueError(f"a value of type {type(value).__name__} is not a list")


_NOT_TEXT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "margin": ("a number", as_number),
    "responses": ("a list of texts, one for each response", as_texts),
    "ranks": ("a list of numbers, one for each response", as_numbers),
    "scores": ("a list of numbers, one for each response", as_numbers),
    "score": ("a number", as_number),
    "conversation": ("a list of messages, or a transcript", read_conversation),
    "history": ("a list of pairs of texts", read_history),
    "tools": ("a list of definitions of tools", as_tools),
    "label": ("a label, or a list of them", as_label),
}
"""Our column that is not text → its kind, and the function that reads it."""
_MAY_BE_TURNS = ("prompt", "response", "chosen", "rejected", "response_a", "response_b")
"""Columns of text that some files have as lists of messages."""
