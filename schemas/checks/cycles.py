"""Find stages that wait for one another."""

from collections.abc import Iterator

from vantage.schemas.checks.partial_recipe import PartialRecipe
from vantage.schemas.checks.references import RecipeReferences
from vantage.schemas.problems import Path, Problem

_CYCLE_REMEDY = "name a stage before them in one of these fields"

Waits = list[tuple[Path, str]]
"""(Path of a field, stage that it names)."""


def cycles(recipe: PartialRecipe, references: RecipeReferences) -> Iterator[Problem]:
    """Yield one problem for each cycle of stages, which lists the whole cycle."""
    waiting = {name: list(_waits(name, recipe, references)) for name in recipe.stages}
    while waiting:
        free = [name for name, waits in waiting.items() if not any(to in waiting for _, to in waits)]
        for name in free:
            del waiting[name]
        if free or not waiting:
            continue
        ring = _find_cycle(waiting)
        listed = ", ".join(f"{name} reads {to} ({'.'.join(map(str, path))})" for name, path, to in ring)
        yield Problem(ring[0][1], f"stages wait for one another: {listed}", _CYCLE_REMEDY)
        for name, _, _ in ring:
            del waiting[name]


def _waits(name: str, recipe: PartialRecipe, references: RecipeReferences) -> Iterator[tuple[Path, str]]:
    """Yield the stages that a stage waits for. A stage that names itself is refused elsewhere."""
    kind = recipe.stages[name].kind
    if kind is None:
        return
    models, judging = references.models[name], references.judging_models[name]
    collected = [each for each in references.data[name] if each.collects]
    others = [each for each in models if each.field in kind.other_models]
    stand_ins = [  # a stage that replaces another model would have to end first
        stand_in for other in (*others, *judging) for stand_in in references.stand_ins.get(other.name, ())
    ]
    for each in (*models, *collected, *judging, *stand_ins):
        if each.name in recipe.stages and each.name != name:
            yield each.path, each.name
    for reward in references.rewards[name]:
        judges = references.scoring_judges.get(reward.name, ())
        replacing = [each for judge in judges for each in references.stand_ins.get(judge.name, ())]
        for each in (*references.reward_models.get(reward.name, ()), *judges, *replacing):
            if each.name in recipe.stages:
                yield each.path, each.name


def _find_cycle(waiting: dict[str, Waits]) -> list[tuple[str, Path, str]]:
    """Return a cycle among stages that all wait for another of them: (stage, field, stage it waits for)."""
    trail: list[tuple[str, Path, str]] = []
    name = next(iter(waiting))
    while name not in (names := [passed for passed, _, _ in trail]):
        path, to = next((path, to) for path, to in waiting[name] if to in waiting)
        trail.append((name, path, to))
        name = to
    return trail[names.index(name) :]
