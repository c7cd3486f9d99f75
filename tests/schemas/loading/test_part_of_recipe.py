"""A part of a recipe is a recipe of its own, whose steps have the stage keys and inputs that they have in the whole."""

import pytest

from vantage.attempts.jobs import work_of
from vantage.runs.resolving import load_resolved
from vantage.schemas.loading.part_of_recipe import Part, part_named, part_of_recipe
from vantage.schemas.loading.recipe_file import builtin_recipes
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.steps import CHECKED_ROWS, dependencies


def resolved(name: str) -> ResolvedRecipe:
    return load_resolved(name)[0]


def below(recipe: ResolvedRecipe, stage: str) -> set[str]:
    """Return a stage and all that it reads, worked out step by step, by recursion."""
    return {stage}.union(*(below(recipe, step) for step in dependencies(recipe)[stage].values()))


@pytest.mark.parametrize("stage", ["sft", "reward", "value", "policy", "evaluation"])
def test_the_steps_of_a_part_are_those_below_its_stage_with_the_same_work_and_inputs(stage: str) -> None:
    whole = resolved("quickstart")
    part = part_of_recipe(whole, Part("until", stage))
    reads, before = dependencies(part), dependencies(whole)
    assert set(reads) - {CHECKED_ROWS} == below(whole, stage)
    for step in reads:
        assert reads[step] == before[step]
        assert work_of(part, step) == work_of(whole, step)
    assert part.publish == ()
    assert ResolvedRecipe.model_validate(part.model_dump(mode="json")) == part, "run.json has it so"


def test_every_stage_of_every_built_in_recipe_is_a_part() -> None:
    tried = 0
    for name in builtin_recipes():
        try:
            whole = resolved(name)
        except ValueError:  # it needs a model or files of the user's
            continue
        for stage in whole.stages:
            part = part_of_recipe(whole, Part("until", stage))
            before = dependencies(whole)
            assert all(
                reads == before[step] for step, reads in dependencies(part).items() if step != CHECKED_ROWS
            )
            tried += 1
    assert tried > 20


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(
        ValueError, match="--until=polic is none of the recipe's stages: sft, reward, value, policy"
    ):
        part_of_recipe(resolved("quickstart"), Part("until", "polic"))
    with pytest.raises(ValueError, match="--until=sft and --only=reward exclude each other"):
        part_named("sft", "reward")
    assert part_named(None, None) is None
    assert str(part_named(None, "sft")) == "only sft"
