"""``--set stages.policy.algorithm.clip_range_high=0.2``: values from the command line laid over a recipe's own."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.plain_yaml import read
from schemas.problems import Path, Problem, RecipeError, quote, suggest

_NAMED = ("data", "rewards", "stages")
"""Fields whose keys are names that the recipe chose; an override does not invent one in passing."""


@dataclass(frozen=True)
class Override:
    """One ``KEY=VALUE``."""

    text: str
    path: Path
    value: Any

    @property
    def source(self) -> str:
        """How problems that it causes are reported."""
        return f"--set {self.text}"


def parse_override(text: str) -> Override:
    """Read ``KEY=VALUE``; the value is YAML (``0.2``, ``ppo``, ``null``, ``{preset: vapo, gamma: 0.99}``).

    Raises:
        RecipeError: no ``=``, an empty key, or a value that is not plain YAML.
    """
    key, equals, written = text.partition("=")
    parts = key.strip().split(".")
    path: Path = tuple(int(part) if part.isdecimal() else part for part in parts)
    if not equals or not all(parts):
        remedy = "write KEY=VALUE, for example stages.policy.seed=3"
        raise RecipeError([Problem((), "is not an override", remedy, source=f"--set {text}")])
    try:
        reading = read(written) if written.strip() else read("null")
    except RecipeError as error:
        said = f"the value {quote(written)} {error.problems[0].message}"
        raise RecipeError([Problem(path, said, "put quotes around text", source=f"--set {text}")]) from None
    if reading.problems:
        raise RecipeError(Problem(path, p.message, p.remedy, source=f"--set {text}") for p in reading.problems)
    return Override(text, path, reading.value)


def apply_overrides(plain: Any, overrides: Sequence[Override]) -> tuple[Any, list[Problem]]:
    """The plain recipe with every override laid over it in turn, and the overrides that found no place."""
    plain, problems = copy.deepcopy(plain), []
    for override in overrides:
        try:
            _apply(plain, override)
        except _NoPlace as error:
            problems.append(Problem(override.path[: error.depth], error.message, error.remedy, source=override.source))
    return plain, problems


class _NoPlace(Exception):
    def __init__(self, depth: int, message: str, remedy: str) -> None:
        self.depth, self.message, self.remedy = depth, message, remedy


def _apply(plain: Any, override: Override) -> None:
    path, node = override.path, plain
    for depth, part in enumerate(path[:-1]):
        node = _enter(node, path, depth, part)
    last, depth = path[-1], len(path) - 1
    if isinstance(node, list):
        node[_index(node, path, depth, last)] = override.value
        return
    if not isinstance(node, dict):
        raise _NoPlace(depth, f"is {quote(node)}, which has no fields", "override the whole value instead")
    if depth == 1 and path[0] in _NAMED and last not in node and not isinstance(override.value, dict):
        raise _NoPlace(2, f"{quote(str(last))} is not in the recipe's {path[0]}", suggest(str(last), node))
    node[str(last)] = override.value


def _enter(node: Any, path: Path, depth: int, part: str | int) -> Any:
    """The mapping or list that the next part of the path looks into; made where a field was left out."""
    if isinstance(node, list):
        return node[_index(node, path, depth, part)]
    if not isinstance(node, dict):
        raise _NoPlace(depth, f"is {quote(node)}, which has no fields", "override the whole value instead")
    key = str(part)
    inner = node.get(key)
    if inner is None:
        if depth == 1 and path[0] in _NAMED:
            raise _NoPlace(2, f"{quote(key)} is not in the recipe's {path[0]}", suggest(key, node))
        inner = node[key] = {}
    elif key == "algorithm" and path[0] == "stages" and depth == 2 and isinstance(inner, str):
        inner = node[key] = {"preset": inner}
    elif key == "gate" and isinstance(inner, list) and len(inner) == 1 and not isinstance(path[depth + 1], int):
        inner = inner[0]
    return inner


def _index(items: list[Any], path: Path, depth: int, part: str | int) -> int:
    if isinstance(part, int) and part < len(items):
        return part
    raise _NoPlace(
        depth,
        f"is a list of {len(items)}, which has no item {quote(str(part))}",
        f"use its number, from 0 to {len(items) - 1}" if items else "override the whole list",
    )
