"""Texts within MLflow's limits: nested values under dotted names, and each text truncated to its limit."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_PARAM_LENGTH, TAG_LENGTH, DESCRIPTION_LENGTH = 6000, 8000, 5000


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Return nested mappings as ``stages.policy.algorithm.gamma`` → text; lists by their position.

    >>> flatten({"a": {"b": 1.0, "c": None}, "d": [True, "x"]})
    {'a.b': '1.0', 'a.c': 'null', 'd.0': 'true', 'd.1': 'x'}
    """
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    elif isinstance(value, str):
        return {prefix: value}
    else:
        return {prefix: json.dumps(value)}
    if not items:
        return {prefix: "{}" if isinstance(value, Mapping) else "[]"} if prefix else {}
    flat: dict[str, str] = {}
    for key, inner in items:
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def fit_tag(text: str) -> str:
    """Return a tag's value, truncated to MLflow's limit after a whole line if there are several."""
    return _fit(text, TAG_LENGTH)


def fit_description(text: str) -> str:
    """Return the description of a model's version: MLflow's column is shorter, and PostgreSQL refuses longer texts."""
    return _fit(text, DESCRIPTION_LENGTH)


def _fit(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    end = "\n…"
    fits = text[: length - len(end)]
    return (fits.rpartition("\n")[0] or fits) + end


def fit_param(value: str) -> str:
    """Return a param's value, or its truncation to MLflow's limit with the sha256 of the whole."""
    if len(value) <= _PARAM_LENGTH:
        return value
    whole = f"… sha256 {hashlib.sha256(value.encode()).hexdigest()}"
    return value[: _PARAM_LENGTH - len(whole)] + whole
