"""Every setting of a recipe is read by some code, so that none is without effect."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]
STAGES = ("models", "tasks")
EVERYTHING = (
    *STAGES,
    *("attempts", "cli", "estimates", "flows", "review", "runs", "signing"),
    "schemas/records/verdicts.py",
    "schemas/recipe/resolved.py",
    "schemas/steps.py",
    "schemas/recipe/guards.py",
    "schemas/recipe/default_guards.py",
    "schemas/recipe/watch.py",
    "schemas/sweep.py",
)
"""Gates are judged, what a recipe may leave open is read, guards and watches are understood, and members of an ensemble are
reseeded in these of the schemas."""


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models(field.annotation)
    elif get_origin(annotation) is not None:
        for argument in get_args(annotation):
            yield from _models(argument)


FIELDS = {(model.__name__, name) for model in _models(Recipe) for name in model.model_fields}
FIELDS -= {("Algorithm", "preset")}  # the preset is gone as soon as its switches are merged with the recipe's


def _modules(place: Path) -> Iterator[Path]:
    return place.rglob("*.py") if place.is_dir() else iter((place,))


@functools.cache
def _names_read(places: tuple[str, ...]) -> frozenset[str]:
    """Return the attributes that are read anywhere in these packages and modules."""
    read = set()
    for file in (file for place in places for file in _modules(ROOT / place)):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    read.add(name)
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                    read.add(name)
    return frozenset(read)


def test_every_field_is_found() -> None:
    assert ("Algorithm", "clip_range_high") in FIELDS
    assert ("Recipe", "publish") in FIELDS
    assert ("MissingEos", "subtract") in FIELDS
    assert ("Returns", "kl_coef") in FIELDS
    assert ("PreferenceCollection", "judge") in FIELDS


def test_every_field_is_read_by_something() -> None:
    """A field is read outside of schemas, or its name is in the tables of references."""
    read = _names_read(EVERYTHING) | {name for kind in KINDS.values() for name in kind.roles}
    assert len(FIELDS) > 100
    assert [f"{model}.{field}" for model, field in FIELDS if field not in read] == []


def test_every_switch_is_read_by_a_stage() -> None:
    """A stage itself reads each switch; a warning about it, or a line of a report, does not make it work."""
    switches = Algorithm.model_fields.keys() - {"preset"}
    assert switches
    assert switches - _names_read(STAGES) == set()
