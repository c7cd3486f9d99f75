"""Guess what a wrong value of a recipe was meant to be, for the remedies of messages."""

import re
from typing import Any

_FACTORS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "b": 1_000_000_000}
_NUMBER = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([%kKmMgGbB]?)")
_SIZE = re.compile(r"([1-9][0-9]*)\s*([MmGgTt]?)(?:i?[Bb])?")


def number_meant(given: str) -> str:
    """Return ``0.05`` for ``5%``, ``400000`` for ``400k`` and ``1e-3`` for a number in quotes; empty: it is no number."""
    found = _NUMBER.fullmatch(given.strip())
    if found is None:
        return ""
    digits, unit = found[1].replace(",", "").replace("_", ""), found[2].lower()
    if unit == "%":
        return f"{float(digits) / 100:g}"
    return f"{float(digits) * _FACTORS[unit]:.0f}" if unit else digits


def size_meant(given: str) -> str:
    """Return ``, as in 16Gi`` for ``16``, ``16G`` and ``16 GB``; else ``, as in 512Mi``."""
    found = _SIZE.fullmatch(given.strip())
    return f", as in {found[1]}{(found[2] or 'G').upper()}i" if found else ", as in 512Mi"


def name_meant(given: str, pattern: str) -> str:
    """Return the nearest text in lower case that matches the pattern; empty: there is none."""
    lower = given.strip().lower()
    for joint in ("-", "_"):
        near = re.sub(r"[^a-z0-9]+", joint, lower).strip("-_")
        if near != given and re.search(pattern, near):
            return near
    return ""


def list_meant(loc: tuple[int | str, ...], given: Any) -> str:
    """Return how a list is written; a gate is written as a mapping, of which a list may have several."""
    if "gate" in loc and isinstance(given, str):
        return "write {metric: NAME, at_least: NUMBER}, or a list of such gates"
    return "write it as [FIRST, SECOND], or each item on a line of its own after `- `"


def mapping_meant(given: Any) -> str:
    """Return how a mapping is written in place of a list or a text."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str):
        return f"write {given[0]} alone, without brackets, or its fields as {{FIELD: VALUE}}"
    if isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
        return "write each entry as `NAME: {…}`, without the dash"
    if isinstance(given, str) and re.match(r"(builtin|hub|gguf|package|models|run):|[./~]", given):
        return f"write {{source: {given!r}}}"
    return "write its fields as {FIELD: VALUE}, or each on an indented line of its own"
