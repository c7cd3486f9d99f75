"""Find the values of two nested mappings that differ, by their paths."""

from collections.abc import Collection, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.difference import FieldDifference

_ABSENT = object()
_BY_STEP = {
    "stages": "", "data": "data.", "models": "models.", "mixtures": "mixtures.", "verifiers": "verifiers.",
    "benchmarks": "benchmarks.",
}  # fmt: skip
"""Field of a recipe → prefix of the steps that its entries define."""


def recipe_differences(
    a: ResolvedRecipe, b: ResolvedRecipe, steps: Collection[str] | None = None
) -> tuple[FieldDifference, ...]:
    """Return fields of two recipes that differ, with every default filled in.

    Args:
        steps: leave out fields about other steps, and what is published; None: compare everything.
    """
    plain = [recipe.model_dump(mode="json") for recipe in (a, b)]
    if steps is not None:
        plain = [_said_of(each, steps) for each in plain]
    return tuple(field_differences(plain[0], plain[1]))


def _said_of(recipe: Mapping[str, Any], steps: Collection[str]) -> dict[str, Any]:
    kept = {}
    for name, value in recipe.items():
        if name in _BY_STEP and isinstance(value, Mapping):
            value = {entry: each for entry, each in value.items() if f"{_BY_STEP[name]}{entry}" in steps}
        if name != "publish":
            kept[name] = value
    return kept


def field_differences(a: Any, b: Any, path: str = "") -> Iterator[FieldDifference]:
    """Yield every value that differs; a mapping or list that one side does not have is one value."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in dict.fromkeys((*a, *b)):
            below = f"{path}.{name}" if path else str(name)
            yield from field_differences(a.get(name, _ABSENT), b.get(name, _ABSENT), below)
    elif isinstance(a, list) and isinstance(b, list):
        for index, (ours, theirs) in enumerate(zip_longest(a, b, fillvalue=_ABSENT)):
            yield from field_differences(ours, theirs, f"{path}.{index}")
    elif a is _ABSENT:
        yield FieldDifference(field=path, b=b, only="b")
    elif b is _ABSENT:
        yield FieldDifference(field=path, a=a, only="a")
    elif a != b or (type(a) is not type(b) and bool in (type(a), type(b))):
        yield FieldDifference(field=path, a=a, b=b)
