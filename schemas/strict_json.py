"""Rules of JSON that Python's reader does not check."""

from collections.abc import Sequence
from typing import Any


def without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's names and values, for ``object_pairs_hook`` of ``json.loads``.

    Raises:
        ValueError: a name occurs twice; Python would keep the last value.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found
