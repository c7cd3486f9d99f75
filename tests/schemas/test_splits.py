"""All datasets of a recipe share one pair of held-out shares, or the recipe is refused."""

from typing import Any

import pytest

from vantage.schemas.checks.agreement import resolve
from vantage.schemas.recipe.inputs import Shares, Split
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.splits import is_only_dataset, shares_of


def resolved(plain: dict[str, Any], **splits: dict[str, Any]) -> tuple[Recipe, list[str]]:
    for name, split in splits.items():
        plain["data"][name]["split"] = split
    recipe, problems = resolve(Recipe.model_validate(plain))
    return recipe, [str(problem) for problem in problems]


def test_a_share_that_one_dataset_names_is_that_of_all(plain: dict[str, Any]) -> None:
    recipe, problems = resolved(plain, pairs={"test": 0.2}, tasks={"test": 64})
    assert problems == []
    assert shares_of(recipe) == Shares(validation=0.05, test=0.2)
    assert recipe.data["demos"].split == Split(validation=0.05, test=0.2)
    assert recipe.data["tasks"].split == Split(validation=0.05, test=64)
    assert resolve(recipe) == (recipe, [])


def test_two_shares_are_refused(plain: dict[str, Any]) -> None:
    _, problems = resolved(plain, demos={"test": 0.1}, pairs={"test": 0.2, "validation": 0.1})
    assert problems == [
        "data.pairs.split.test: 0.2 is not the test share of data.demos (0.1); prompts that one holds out would train "
        "the other; use one share in all, or a number of rows, which is taken from it"
    ]


def test_shares_that_leave_nothing_to_train_on_are_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="validation=0.7 and test=0.5 leave nothing to train on; use shares that add up"
    ):
        Split(validation=0.7, test=0.5)
    _, problems = resolved(plain, demos={"test": 0.5}, pairs={"validation": 0.5})
    assert problems == [
        "data: the shares of all datasets (validation 0.5 and test 0.5) leave nothing to train on; "
        "use shares that add up to less than 1"
    ]
    _, problems = resolved(plain, demos={"test": 0.97}, pairs={})
    assert "validation 0.05 and test 0.97" in problems[0]


def test_only_a_lone_dataset_may_reach_beyond_its_share(plain: dict[str, Any]) -> None:
    recipe, _ = resolved(plain, tasks={"test": 64})
    assert not is_only_dataset(recipe, "tasks")
    lone = recipe.model_copy(update={"data": {"tasks": recipe.data["tasks"]}})
    assert is_only_dataset(lone, "tasks")
    assert not is_only_dataset(lone.model_copy(update={"data": {"demos": recipe.data["demos"]}}), "demos")
