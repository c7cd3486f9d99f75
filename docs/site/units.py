"""Name the unit of a recipe field, by its name."""

from typing import Any

UNITS = (
    (("_tokens",), "tokens"),
    (("seconds",), "s"),
    (("_gb",), "GB"),
    (("_mb",), "MB"),
    (("_steps",), "steps"),
    (("rows",), "rows"),
    (("iterations", "validate_every"), "iterations"),
    (("epochs",), "passes"),
    (("batch_size", "samples_per_prompt", "_samples"), "sequences"),
)
"""Ends of names → unit. The first that fits is taken."""


def unit_of(name: str, field: dict[str, Any]) -> str:
    """Return the unit, ``1`` for plain numbers, or a dash for what is no number."""
    if not _is_number(field):
        return "–"
    return next((unit for ends, unit in UNITS if name.endswith(ends)), "1")


def _is_number(field: dict[str, Any]) -> bool:
    kinds = [field, *field.get("anyOf", ()), *field.get("oneOf", ())]
    return any(each.get("type") in ("integer", "number") for each in kinds)
