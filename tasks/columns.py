"""From a row of somebody's file to our columns: names, paths into nested values, and templates."""

import re
from collections.abc import Mapping
from typing import Any

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")

Row = Mapping[str, Any]


class MissingColumn(ValueError):
    """A mapping that names what the rows do not have."""


def map_row(row: Row, columns: Mapping[str, str]) -> dict[str, str | None]:
    """Our column → its text in ``row``; None where the file holds nothing there."""
    return {ours: _text_at(row, spec, ours) for ours, spec in columns.items()}


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
                f"columns.{ours}={path!r}: there is no {part!r} in the data; it has: {', '.join(map(str, _keys(value)))}"
            )
    return value


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
