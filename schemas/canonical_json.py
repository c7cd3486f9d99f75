"""Write a JSON value as canonical text, for digests: equal values give equal bytes, in whatever order they were written."""

import json
import math
from collections.abc import Mapping
from typing import Any


def canonical_json(value: Any) -> str:
    """Return the canonical text of a value: sorted keys, no spaces, ASCII, floats in their shortest exact form.

    Raises:
        ValueError: a key is not a string, or a value is not JSON (NaN and infinity are not).
    """
    _require_json(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _require_json(value: Any, path: str) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path}={value} is not JSON; use a finite number or None")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r}, which is not JSON; use a string")
            _require_json(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_json(item, f"{path}.{index}")
    else:
        raise ValueError(
            f"{path} is a {type(value).__name__}, which is not JSON; use numbers, strings, lists and mappings"
        )
