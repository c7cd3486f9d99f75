"""Overrides: ``--set stages.policy.algorithm.clip_range_high=0.2`` replaces a value of the recipe."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vantage.schemas.loading.plain_yaml import MAX_DEPTH, is_text, read
from vantage.schemas.problems import (
    Path,
    Problem,
    RecipeError,
    quote,
    suggest,
)

_NAMED = ("data", "rewards", "stages")
"""Fields whose keys are names of the recipe; an override of a field inside cannot add a new name."""


@dataclass(frozen=True)
class Override:
    """One ``KEY=VALUE``."""

    text: str
    path: Path
    value: Any

    @property
    def source(self) -> str:
        """The ``source`` of problems that it causes."""
        return f"--set {self.text}"


def parse_override(text: str) -> Override:
    """Read ``KEY=VALUE``; the value is YAML (``0.2``, ``ppo``, ``null``, ``{preset: vapo, gamma: 0.99}``).

    Raises:
        RecipeError: no ``=``, an empty key, or a value that is not plain YAML.
    """
    key, equals, written = text.partition("=")
    if not is_text(key):
        raise RecipeError([Problem((), "is no text", "write it in UTF-8", source=f"--set {text}")])
    parts = key.strip().split(".")
    path: Path = tuple(int(part) if _is_index(part) else part for part in parts)
    if not equals or not all(parts):
        remedy = "write KEY=VALUE, for example stages.policy.seed=3"
        raise RecipeError([Problem((), "is not an override", remedy, source=f"--set {text}")])
    if len(parts) > MAX_DEPTH:
        said = f"is a key of {len(parts)} parts, and a recipe has at most {MAX_DEPTH}"
        raise RecipeError([Problem((), said, "name a field of a recipe", source=f"--set {text}")])
    try:
        reading = read(written) if written.strip() else read("null")
    except RecipeError as error:
        said = f"the value {quote(written)} {error.problems[0].message}"
        raise RecipeError([Problem(path, said, "put quotes around text", source=f"--set {text}")]) from None
    if reading.problems:
        raise RecipeError(
            Problem(path, p.message, p.remedy, source=f"--set {text}") for p in reading.problems
        )
    return Override(text, path, reading.value)


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) <= 9


def apply_overrides(
    plain: Any, overrides: Sequence[Override]
) -> tuple[Any, dict[Path, Override], list[Problem]]:
    """Apply the overrides to the plain recipe, in order.

    Returns:
        A changed copy; path → the override that set it; problems of overrides that could not be applied.
    """
    plain = copy.deepcopy(plain)
    placed: dict[Path, Override] = {}
    problems: list[Problem] = []
    for override in overrides:
        try:
            path = _apply(plain, override)
        except _InvalidPath as error:
            field = override.path[: error.depth]
            problems.append(Problem(field, error.message, error.remedy, source=override.source))
        else:
            # Forget earlier overrides whose values this one has replaced.
            placed = {place: earlier for place, earlier in placed.items() if place[: len(path)] != path}
            placed[path] = override
    return plain, placed, problems


class _InvalidPath(Exception):
    def __init__(self, depth: int, message: str, remedy: str) -> None:
        self.depth, self.message, self.remedy = depth, message, remedy


def _apply(plain: Any, override: Override) -> Path:
    """Set the override's value in ``plain``; returns its path there."""
    node, path = plain, override.path
    reached: Path = ()
    for depth, part in enumerate(path[:-1]):
        key = _key(node, part, depth)
        if isinstance(node, dict) and node.get(key) is None:
            _refuse_new_name(node, path, depth)
            node[key] = {}
        elif key == "algorithm" and isinstance(node[key], str):
            node[key] = {"preset": node[key]}  # the recipe used the short form
        node, reached = node[key], (*reached, key)
        if (
            key == "gate"
            and isinstance(node, list)
            and len(node) == 1
            and not isinstance(path[depth + 1], int)
        ):
            node, reached = node[0], (*reached, 0)  # a list of one gate is one gate
    key = _key(node, path[-1], len(path) - 1)
    if not isinstance(override.value, dict):
        _refuse_new_name(node, path, len(path) - 1)
    node[key] = override.value
    return (*reached, key)


def _key(node: Any, part: str | int, depth: int) -> str | int:
    """Return the path's part as a key of the mapping, or as an index of the list, ``node``."""
    if isinstance(node, dict):
        return str(part)
    if not isinstance(node, list):
        raise _InvalidPath(
            depth, f"is {quote(node)}, which has no fields", "override the whole value instead"
        )
    if isinstance(part, int) and part < len(node):
        return part
    remedy = f"use its number, from 0 to {len(node) - 1}" if node else "override the whole list"
    raise _InvalidPath(depth, f"is a list of {len(node)}, which has no item {quote(str(part))}", remedy)


def _refuse_new_name(node: Any, path: Path, depth: int) -> None:
    """Refuse to add a stage, dataset or reward field by field; it can only be added as a whole."""
    name = str(path[depth])
    if depth == 1 and path[0] in _NAMED and name not in node:
        raise _InvalidPath(2, f"{quote(name)} is not in the recipe's {path[0]}", suggest(name, node))
