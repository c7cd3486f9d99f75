"""The part of a recipe that one stage needs: a recipe of its own, whose steps have the same stage keys."""

from dataclasses import dataclass
from typing import Any, Literal

from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.steps import dependencies, rewards_read


@dataclass(frozen=True)
class Part:
    """The part of a recipe that a person asks for."""

    extent: Literal["until", "only"]
    """``until``: a stage and all that it reads. ``only``: the stage alone, whose inputs must exist already."""
    stage: str

    def __str__(self) -> str:
        return f"{self.extent} {self.stage}"


def part_named(until: str | None, only: str | None) -> Part | None:
    """Return the part that two options name; None: the whole recipe. Raises ValueError for both."""
    if until is not None and only is not None:
        raise ValueError(f"--until={until} and --only={only} exclude each other; leave one out")
    if until is not None:
        return Part("until", until)
    return None if only is None else Part("only", only)


def part_of_recipe(recipe: ResolvedRecipe, part: Part) -> ResolvedRecipe:
    """Return the recipe with one stage and all that it reads, directly or not; it publishes nothing.

    All datasets stay in it: datasets that nothing reads any longer make no step, and test sets are still kept apart
    from the others.

    Raises:
        ValueError: the recipe has no such stage.
    """
    if part.stage not in recipe.stages:
        raise ValueError(
            f"--{part.extent}={part.stage} is none of the recipe's stages: {', '.join(recipe.stages)}; name one of them"
        )
    reads = dependencies(recipe)
    needed, found = set[str](), {part.stage}
    while found:
        needed |= found
        found = {step for each in found for step in reads[each].values()} - needed
    stages = {name: each for name, each in recipe.stages.items() if name in needed}
    rewards = {reward for each in stages.values() for reward in rewards_read(each)}
    changes: dict[str, Any] = {
        "stages": stages,
        "rewards": {name: each for name, each in recipe.rewards.items() if name in rewards},
        "publish": (),
    }
    return recipe.model_copy(update=changes)
