"""Validate a plain recipe: its fields, the names in it, and what its stages inherit from one another."""

from typing import Any

from vantage.schemas.checks.agreement import resolve
from vantage.schemas.checks.names import name_problems
from vantage.schemas.checks.references import resolved_references
from vantage.schemas.loading.field_errors import is_about, validated
from vantage.schemas.loading.partial_reading import Plain, partial_recipe
from vantage.schemas.problems import Problem
from vantage.schemas.recipe.recipe import Recipe


def validated_recipe(plain: Any) -> tuple[Recipe | None, list[Problem]]:
    """Return the recipe and its problems: in fields, in names, and between stages; None if there are problems."""
    if not isinstance(plain, dict):
        return None, [Problem((), "is not a mapping", "a recipe starts with `recipe: NAME`")]
    if "sweep" in plain:
        return None, [Problem(("sweep",), "is a sweep, not a recipe", "use `vantage sweep`")]
    named = problems_of_names(plain)
    fields = validated(Recipe, plain)
    problems = [*fields.problems, *named]
    recipe, omitted = fields.value, fields.omitted
    if recipe is None or named or (omitted and problems_of_names(fields.plain)):
        return None, problems
    # the stages have inherited ``rollout``
    recipe, disagreements = resolve(recipe.model_copy(update={"rollout": None}))
    problems += (problem for problem in disagreements if not any(is_about(problem, p) for p in omitted))
    return (None if problems else recipe), problems


def problems_of_names(plain: Plain) -> list[Problem]:
    """Return the problems of the names in a plain recipe. Each name is looked up once, before all checks."""
    recipe = partial_recipe(plain)
    return name_problems(recipe, resolved_references(recipe))
