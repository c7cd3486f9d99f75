"""Values of JSON as JSON compares them: 1 is 1.0 and is not true, which Python finds equal."""

from collections.abc import Hashable
from typing import Any


def comparable(value: Any) -> Hashable:
    """Return a value that equals that of another document exactly if the two documents are equal."""
    if isinstance(value, dict):
        return "object", frozenset((name, comparable(each)) for name, each in value.items())
    if isinstance(value, list):
        return "array", tuple(map(comparable, value))
    return ("boolean", value) if isinstance(value, bool) else value
