"""From a row of somebody's file to our columns: names, paths into nested values, and templates of text."""

import re
from collections.abc import Callable, Mapping
from typing import Any

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")

Row = Mapping[str, Any]


class MissingColumn(ValueError):
    """A mapping that names what the rows do not have."""


def map_row(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """Our column → what ``row`` holds for it; None where the file holds nothing there.

    Most columns are text. ``margin`` is a number, ``responses`` a list of texts, ``ranks`` a list of numbers.

    Raises:
        MissingColumn: a column, or a part of a path, that the row does not have.
        ValueError: a value of another kind, or a template for what is not text.
    """
    return {
        ours: _value_at(row, spec, ours) if ours in _NOT_TEXT else _text_at(row, spec, ours)
        for ours, spec in columns.items()
    }


def _value_at(row: Row, spec: str, ours: str) -> Any:
    kind, read = _NOT_TEXT[ours]
    if "{" in spec:
        raise ValueError(
            f"columns.{ours}={spec!r} is a template, which makes a text, and {ours} is {kind}; name a column of the file"
        )
    value = _follow(row, spec, ours)
    try:
        return None if value is None else read(value)
    except ValueError as error:
        raise ValueError(f"columns.{ours}={spec!r}: {error}; {ours} is {kind}{_hint(ours)}") from error


def _text_at(row: Row, spec: str, ours: str) -> str | None:
    if "{" not in spec:
        return as_text(_follow(row, spec, ours))
    # Lines of a template that come out empty (an optional input, say) are left out.
    filled = _PLACEHOLDER.sub(lambda match: as_text(_follow(row, match[1], ours)) or "", spec)
    return "\n".join(line for line in filled.splitlines() if line.strip())


def _follow(row: Row, path: str, ours: str) -> Any:
    """The value at ``a.b.0``: keys of mappings, indices of lists. A column's own name may hold dots."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if value is None:
            return None
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.lstrip("-").isdigit() and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            raise MissingColumn(
                f"columns.{ours}={path!r}: there is no {part!r} in the data; "
                f"it has: {', '.join(map(str, _keys(value)))}{_hint(ours)}"
            )
    return value


def _hint(ours: str) -> str:
    """What people have instead of ranks, and how it becomes them."""
    if ours != "ranks":
        return ""
    return ". Ranks are positions: 1 is the best, and equal ranks tie; of scores, where higher is better, give −score"


def _keys(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return sorted(value)
    return [f"items 0 to {len(value) - 1}"] if isinstance(value, list) and value else ["nothing"]


def as_text(value: Any) -> str | None:
    """The text of a value: a string, a number, one chat message, or a list of messages.

    Of one message, and of a list with one, it is the content. Of a list that ends in an assistant's message, as
    preference files carry it in ``chosen``, it is that last content. Other lists become ``Role: content`` lines.
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
    raise ValueError(
        f"a value of type {type(value).__name__} is not text; name the part that is (for example a.b.0)"
    )


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
    """A number; a text that looks like one is none, so that a wrong column is not read by accident."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a value of type {type(value).__name__} is not a number")
    return float(value)


def as_texts(value: Any) -> list[str | None]:
    """A list of texts, each as ``as_text`` reads it."""
    return [as_text(item) for item in _as_list(value)]


def as_numbers(value: Any) -> list[float | None]:
    """A list of numbers."""
    return [as_number(item) for item in _as_list(value)]


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a value of type {type(value).__name__} is not a list")
    return value


_NOT_TEXT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "margin": ("a number", as_number),
    "responses": ("a list of texts, one for each response", as_texts),
    "ranks": ("a list of numbers, one for each response", as_numbers),
}
"""Our column that is not text → what it is instead, and what reads it."""
