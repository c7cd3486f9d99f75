"""Mixtures of datasets in a recipe make the right steps, and wrong ones are refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.every import every
from vantage.attempts.jobs import key_parts_of, steps_of, work_of
from vantage.estimates.recipe_estimate import estimate_recipe
from vantage.schemas.checks.few_prompts import few_prompts
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.loading.validation import problems_of_names
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.learning_rates import with_learning_rates
from vantage.schemas.recipe.recipe import Recipe, ResolvedRecipe
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import content_of, dependencies, ordered_steps


@pytest.fixture
def mixed(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe whose ``sft`` reads a mixture of two datasets, and whose ``value``, ``policy`` and ``evaluation``
    read one of prompts.
    """
    plain["data"]["more"] = {"source": "builtin:arithmetic_long/demonstrations", "max_dropped": 0.5}
    plain["data"]["questions"] = {"source": "builtin:arithmetic/prompts", "rows": 300}
    plain["mixtures"] = {
        "both": {"parts": {"demos": 7, "more": 3}},
        "asked": {"parts": {"tasks": 0.5, "questions": 0.5}, "split": {"test": 20}},
    }
    plain["stages"]["sft"]["data"] = "both"
    for stage in ("value", "policy", "evaluation"):
        plain["stages"][stage]["prompts"] = "asked"
    return plain


def resolved(plain: dict[str, Any]) -> ResolvedRecipe:
    return ResolvedRecipe.of(with_learning_rates(loaded(plain), width=64))


def loaded(plain: dict[str, Any]) -> Recipe:
    return parse_recipe(yaml.safe_dump(plain, sort_keys=False), name="x.yaml")


def test_a_mixture_is_a_step_that_reads_its_parts(mixed: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(mixed)
    assert problems_of_names(mixed) == []
    inputs = dependencies(recipe)
    assert inputs["mixtures.both"] == {"part.0": "data.demos", "part.1": "data.more"}
    assert inputs["sft"]["data"] == "mixtures.both"
    assert inputs["policy"]["prompts"] == "mixtures.asked"
    order = ordered_steps(recipe)
    assert order.index("data.more") < order.index("mixtures.both") < order.index("sft")
    contents = {name: content_of(recipe, name) for name in ("both", "demos", "more", "asked", "questions")}
    assert contents == {
        "both": "demonstrations", "demos": "demonstrations", "more": "demonstrations",
        "asked": "prompts", "questions": "prompts",
    }  # fmt: skip
    assert warnings(recipe, dependencies(recipe)) == []


def test_the_work_has_shares_and_its_key_no_names(mixed: dict[str, Any]) -> None:
    recipe = resolved(mixed)
    work = work_of(recipe, "mixtures.both")
    assert work.model_dump(mode="json") == {
        "kind": "mix_data", "content": "demonstrations", "parts": ["demos", "more"], "weights": [0.7, 0.3],
        "rows": None, "split": {"validation": None, "test": None},
    }  # fmt: skip
    digests = {"part.0": "a" * 64, "part.1": "b" * 64}
    parts = key_parts_of(recipe, "mixtures.both", digests)
    assert parts["inputs"] == digests and parts["seed"] == 0
    assert "demos" not in str(parts) and "both" not in str(parts)
    assert steps_of(recipe)["sft"].max_dropped == {"data": 0.5}
    mixed["seed"] = 1
    other = key_parts_of(resolved(mixed), "mixtures.both", digests)
    assert stage_key(other) != stage_key(parts)
    with pytest.raises(ValueError, match=r"mix_data stage: the content digest of 'part\.1' is missing"):
        key_parts_of(recipe, "mixtures.both", {"part.0": "a" * 64})


def test_its_rows_and_lengths_are_estimated(mixed: dict[str, Any]) -> None:
    """The rows and lengths of a mixture are estimated."""
    mixed["mixtures"]["both"]["rows"] = 1000
    recipe = loaded(mixed)
    [sft] = [stage for stage in estimate_recipe(recipe, gpu="h100").stages if stage.name == "sft"]
    assert "a mixture of" in str(sft.workload)


def test_few_test_rows_of_a_mixture_are_warned_of(mixed: dict[str, Any]) -> None:
    mixed["stages"]["evaluation"]["gate"] = {"metric": "accuracy", "at_least": 0.5}
    recipe = Recipe.model_validate(mixed)
    [_, said] = few_prompts(recipe, dependencies(recipe), {})
    assert (
        said.startswith("stages.evaluation.gate: accuracy is")
        and "measured on 20 prompts at most" in said
        and said.endswith("set more apart in mixtures.asked.split.test")
    )


def test_a_mixture_that_no_stage_reads_is_warned_of(mixed: dict[str, Any]) -> None:
    mixed["stages"]["sft"]["data"] = "demos"
    recipe = Recipe.model_validate(mixed)
    said = warnings(recipe, dependencies(recipe))
    assert said == ["data.more: no stage reads it", "mixtures.both: no stage reads it"]


@every(
    ("path", "value", "message"),
    [
        ("both.parts", {"demos": 1, "mor": 1}, "mixtures.both.parts.mor: no dataset is called 'mor'; did you mean 'more'?"),
        ("both.parts", {"demos": 1, "asked": 1}, "mixtures.both.parts.asked: 'asked' is a mixture too; name datasets here"),
        ("both.parts", {"demos": 1, "both": 1}, "mixtures.both.parts.both: 'both' is this mixture itself; name datasets"),
        ("both.parts", {"demos": 1, "sft": 1}, "mixtures.both.parts.sft: 'sft' is a stage; a part of a mixture is a dataset"),
        ("both.parts", {"demos": 1, "pairs": 1}, "reads as demonstrations what stages.reward.data reads as preferences"),
        ("asked.parts", {"tasks": 1, "pairs": 1}, "reads as prompts what stages.reward.data reads as preferences"),
        ("demos", {"parts": {"tasks": 1, "more": 1}}, "mixtures.demos: a dataset is called 'demos' too"),
    ],
)  # fmt: skip
def test_wrong_parts(mixed: dict[str, Any], path: str, value: Any, message: str) -> None:
    """A wrong part or field of a mixture is refused by its path."""
    name, _, field = path.partition(".")
    if field:
        mixed["mixtures"][name][field] = value
    else:
        mixed["mixtures"][name] = value
    problems = [str(problem) for problem in problems_of_names(mixed)]
    assert any(message in problem for problem in problems), problems


def test_answers_and_verifiers_of_every_part_are_asked_for(mixed: dict[str, Any]) -> None:
    mixed["data"]["questions"] = {"source": "builtin:arithmetic_long/prompts"}
    [problem, *_] = [str(problem) for problem in problems_of_names(mixed)]
    assert "'arithmetic' does not understand the prompts that evaluation reads (data.questions" in problem
    mixed["data"]["questions"] = {"source": "q.jsonl", "columns": {"prompt": "q"}}
    mixed["verifiers"] = {"same": {"source": "builtin:exact_match"}}
    mixed["stages"]["evaluation"]["judge"] = {"verifier": "same"}
    said = [str(problem) for problem in problems_of_names(mixed)]
    assert any(
        "data.questions, which evaluation reads, has none; add data.questions.columns.answer" in each
        for each in said
    )


@every(
    ("mixture", "said"),
    [
        ("{parts: {demos: 1}}", "mixtures.both.parts"),
        ("{parts: {demos: 1, more: 0}}", "mixtures.both.parts.more"),
        ("{parts: {demos: 1, more: -1}}", "mixtures.both.parts.more"),
        ("{parts: {demos: 1, more: 1}, rows: 0}", "mixtures.both.rows"),
        ("{parts: {demos: 1, more: 1}, split: {test: 0.1}}", "mixtures.both.split.test"),
        ("{source: x.jsonl}", "mixtures.both.source"),
    ],
)
def test_wrong_values_are_told_at_their_field(text: str, mixture: str, said: str) -> None:
    text = text.replace(
        "rewards:\n",
        f'  more: {{source: "builtin:arithmetic_long/demonstrations"}}\nmixtures:\n  both: {mixture}\nrewards:\n',
        1,
    )
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, name="x.yaml")
    assert any(f"{said}:" in str(problem) for problem in caught.value.problems), str(caught.value)


def test_a_recipe_without_mixtures_says_nothing_of_them(plain: dict[str, Any], tmp_path: Path) -> None:
    assert "mixtures" not in Recipe.model_validate(plain).model_dump(mode="json")
