"""Compare values of JSON as JSON does: 1 equals 1.0 and does not equal true, which it does in Python."""

from collections.abc import Hashable
from typing import Any


def comparable(value: Any) -> Hashable:
    """Return a value that equals that of another document exactly if the two documents are equal."""
    if isinstance(value, dict):
        return "object", frozenset((name, comparable(each)) for name, each in value.items())
    if isinstance(value, list):
        return "array", tuple(map(comparable, value))
    return ("boolean", value) if isinstance(value, bool) else value
