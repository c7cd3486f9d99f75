"""Test sets, and datasets that are kept apart from others' held-out prompts, have steps and keys; wrong ones are refused."""

from typing import Any

import pytest
import yaml

from tests.support.every import every
from vantage.attempts.jobs import key_parts_of, work_of
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.learning_rates import with_learning_rates
from vantage.schemas.recipe.recipe import Recipe, ResolvedRecipe
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.splits import is_only_dataset
from vantage.schemas.steps import content_of, dependencies, ordered_steps


@pytest.fixture
def apart(plain: dict[str, Any], tmp_path: Any) -> dict[str, Any]:
    """Return a recipe with an ``exam`` that only the evaluation reads, and ``tasks`` that is kept apart from what
    ``demos`` holds out.
    """
    for name in ("exam.jsonl", "tasks.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    plain["data"]["exam"] = {"source": str(tmp_path / "exam.jsonl"), "split": {"test": "all"}}
    plain["data"]["tasks"] = {
        "source": str(tmp_path / "tasks.jsonl"),
        "near_duplicates": {"held_out_of": ["demos", "exam"]},
    }
    plain["stages"]["evaluation"]["prompts"] = "exam"
    return plain


def loaded(plain: dict[str, Any]) -> Recipe:
    return parse_recipe(yaml.safe_dump(plain, sort_keys=False), name="x.yaml")


def resolved(plain: dict[str, Any]) -> ResolvedRecipe:
    return ResolvedRecipe.of(with_learning_rates(loaded(plain), width=64))


def test_every_other_dataset_reads_a_test_set(apart: dict[str, Any]) -> None:
    recipe = loaded(apart)
    inputs = dependencies(recipe)
    assert inputs["data.exam"] == {}
    assert inputs["data.demos"] == inputs["data.pairs"] == {"test_set.0": "data.exam"}
    assert inputs["data.tasks"] == {"test_set.0": "data.exam", "held_out.0": "data.demos"}
    order = ordered_steps(recipe)
    assert order.index("data.exam") < order.index("data.demos") < order.index("data.tasks")
    assert content_of(recipe, "exam") == "prompts"


def test_one_that_no_stage_reads_is_kept_apart_all_the_same(apart: dict[str, Any]) -> None:
    apart["stages"]["evaluation"]["prompts"] = "tasks"
    recipe = loaded(apart)
    assert dependencies(recipe)["data.demos"] == {"test_set.0": "data.exam"}
    assert content_of(recipe, "exam") == "prompts"
    assert not [said for said in warnings(recipe, dependencies(recipe)) if "exam" in said]


def test_the_shares_of_others_leave_it_alone(apart: dict[str, Any]) -> None:
    recipe = loaded(apart)
    assert recipe.data["exam"].split.model_dump() == {"validation": None, "test": "all"}
    assert recipe.data["demos"].split.validation is not None
    apart["data"] = {name: apart["data"][name] for name in ("demos", "exam")}
    apart["data"]["demos"]["split"] = {"test": 500}
    assert is_only_dataset(Recipe.model_construct(data=loaded_data(apart)), "demos")


def loaded_data(plain: dict[str, Any]) -> Any:
    return Recipe.model_validate({**plain, "stages": {"sft": plain["stages"]["sft"]}}).data


def test_what_it_is_kept_apart_from_is_in_the_key_by_content_alone(apart: dict[str, Any]) -> None:
    recipe = resolved(apart)
    assert work_of(recipe, "data.tasks").model_dump(mode="json")["test_sets"] == ["exam"]
    digests = {"test_set.0": "a" * 64, "held_out.0": "b" * 64}
    parts = key_parts_of(recipe, "data.tasks", digests)
    assert parts["inputs"] == {**digests, "source": parts["inputs"]["source"]}
    assert "exam" not in str(parts) and "demos" not in str(parts)
    assert stage_key(key_parts_of(recipe, "data.tasks", {**digests, "held_out.0": "c" * 64})) != stage_key(
        parts
    )
    with pytest.raises(ValueError, match=r"the content digest of 'held_out\.0' is missing"):
        key_parts_of(recipe, "data.tasks", {"test_set.0": "a" * 64})


@every(
    ("path", "value", "message"),
    [
        ("data.exam.split", {"test": "all", "validation": 5}, "data.exam.split: validation=5 of a dataset whose rows are all test rows"),
        ("data.exam.rows", 5, "data.exam: rows is about rows for training, and with split.test=all there are none"),
        ("data.exam.near_duplicates", {}, "data.exam: near_duplicates is about rows for training, and with split.test=all"),
        ("data.exam.source", "builtin:arithmetic/prompts", "split.test=all makes a test set of a file, and source="),
        ("data.tasks.near_duplicates.held_out_of", ["demo"], "data.tasks.near_duplicates.held_out_of.0: no dataset is called 'demo'; did you mean 'demos'?"),
        ("data.tasks.near_duplicates.held_out_of", ["tasks"], "held_out_of.0: 'tasks' is the dataset itself; its own held-out"),
        ("data.tasks.near_duplicates.held_out_of", ["demos", "demos"], "near_duplicates: held_out_of has demos twice; leave one out"),
        ("data.demos", {"source": "builtin:arithmetic/demonstrations", "near_duplicates": {"held_out_of": ["tasks"]}},
         "datasets wait for one another: data.demos is kept apart from data.tasks, data.tasks is kept apart from data.demos; leave one"),
        ("stages.policy.prompts", "exam", "stages.policy.prompts: reads rows for training, and data.exam has test rows alone"),
        ("mixtures", {"both": {"parts": {"tasks": 1, "exam": 1}}}, "mixtures.both.parts.exam: data.exam has test rows alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_apart_is_refused(
    apart: dict[str, Any], path: str, value: Any, message: str
) -> None:
    *parents, last = path.split(".")
    place = apart
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(RecipeError) as caught:
        loaded(apart)
    assert message in str(caught.value)


def test_a_mixture_is_named_by_its_parts(apart: dict[str, Any]) -> None:
    apart["data"]["more"] = {"source": "builtin:arithmetic_long/demonstrations"}
    apart["mixtures"] = {"both": {"parts": {"demos": 1, "more": 1}}}
    apart["stages"]["sft"]["data"] = "both"
    apart["data"]["tasks"]["near_duplicates"]["held_out_of"] = ["both"]
    with pytest.raises(RecipeError, match=r"held_out_of\.0: 'both' is a mixture; name its parts"):
        loaded(apart)
