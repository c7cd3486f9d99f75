"""The dataset that a stage makes can be named by the right stages, which wait for it, and by no taken name."""

import json
from typing import Any

import pytest

from tests.support.every import every
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.loading.validation import problems_of_names
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.steps import (
    content_of,
    dependencies,
    ordered_steps,
    rewards_read,
)


@pytest.fixture
def plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the small recipe with a second reward model, and a policy, that learn what the first policy's samples
    teach.
    """
    plain["stages"] |= {
        "taste": {"kind": "reward_model", "init": "sft", "data": "sampled"},
        "direct": {"kind": "dpo", "init": "policy", "data": "sampled"},
        "sampled": {
            "kind": "preference_collection",
            "policy": "policy",
            "prompts": "tasks",
            "judge": {"reward": "main"},
        },
    }
    return plain


def said(plain: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in problems_of_names(plain)]


def test_both_learners_of_preferences_may_name_it(plain: dict[str, Any]) -> None:
    assert said(plain) == []
    inputs = dependencies(Recipe.model_validate(plain))
    assert inputs["taste"] == {"init": "sft", "data": "sampled"}
    assert inputs["direct"] == {"init": "policy", "reference": "policy", "data": "sampled"}
    assert inputs["sampled"] == {"policy": "policy", "prompts": "data.tasks", "reward.main.0": "reward"}


def test_who_learns_from_it_comes_after_it(plain: dict[str, Any]) -> None:
    steps = ordered_steps(Recipe.model_validate(plain))
    assert steps[-4:] == ["evaluation", "sampled", "taste", "direct"]
    assert set(steps) == {"model", "data.demos", "data.pairs", "data.tasks", *plain["stages"]}


def test_a_recipe_with_it_loads_and_loads_again(plain: dict[str, Any]) -> None:
    recipe = parse_recipe(json.dumps(plain))
    assert parse_recipe(recipe.model_dump_json()) == recipe


def test_demonstrations_against_the_policys_own_answers(plain: dict[str, Any]) -> None:
    plain["stages"]["sampled"] = {"kind": "preference_collection", "policy": "sft", "demonstrations": "demos"}
    assert said(plain) == []
    recipe = Recipe.model_validate(plain)
    assert dependencies(recipe)["sampled"] == {"policy": "sft", "demonstrations": "data.demos"}
    assert rewards_read(recipe.stages["sampled"]) == ()


def test_the_reward_that_judges_is_read_and_a_verifier_is_none(plain: dict[str, Any]) -> None:
    assert rewards_read(Recipe.model_validate(plain).stages["sampled"]) == ("main",)
    plain["stages"]["sampled"]["judge"] = {"verifier": "arithmetic"}
    recipe = Recipe.model_validate(plain)
    assert rewards_read(recipe.stages["sampled"]) == ()
    assert dependencies(recipe)["sampled"] == {"policy": "policy", "prompts": "data.tasks"}


def test_prompts_of_demonstrations_do(plain: dict[str, Any]) -> None:
    """A collection may take its prompts from demonstrations."""
    plain["stages"]["sampled"]["prompts"] = "demos"
    assert said(plain) == []
    assert content_of(Recipe.model_validate(plain), "demos") == "demonstrations"


@every(
    ("stage", "fields", "message"),
    [
        ("taste", {"data": "sampeld"}, "stages.taste.data: no dataset is called 'sampeld'; did you mean 'sampled'?"),
        ("direct", {"data": "zzz"}, "stages.direct.data: no dataset is called 'zzz'; "
         "use one of: demos, pairs, tasks, sampled"),
        ("taste", {"data": "value"}, "stages.taste.data: 'value' is a value_pretraining stage; "
         "a data is a preference_collection stage; use one of: sampled"),
        ("taste", {"data": None, "rankings": "sampled"}, "stages.taste.rankings: no dataset is called 'sampled'"),
        ("taste", {"centre_on": "sampled"}, "stages.taste.centre_on: no dataset is called 'sampled'"),
        ("sft", {"data": "sampled"}, "stages.sft.data: no dataset is called 'sampled'; use one of: demos, pairs, tasks"),
        ("sampled", {"policy": "reward"}, "stages.sampled.policy: 'reward' is a reward_model stage; a policy is a sft or "),
        ("sampled", {"judge": {"reward": "mian"}}, "stages.sampled.judge.reward: no reward is called 'mian'; "
         "did you mean 'main'?"),
        ("sampled", {"judge": {"verifier": "gsm8k"}}, "stages.sampled.judge.verifier: no verifier is called 'gsm8k'"),
        ("sampled", {"prompts": "pairs"}, "stages.sampled.prompts: reads as prompts what stages.reward.data reads as "
         "preferences"),
        ("sampled", {"gate": {"metric": "accuracy", "at_least": 0.5}}, "stages.sampled.gate.metric: a preference_collection "
         "stage does not measure 'accuracy'; use one of: mean_chosen_length, "),
        ("evaluation", {"candidate": "sampled"}, "stages.evaluation.candidate: 'sampled' is a preference_collection stage"),
    ],
)  # fmt: skip
def test_wrong_names(plain: dict[str, Any], stage: str, fields: dict[str, Any], message: str) -> None:
    """A name of the wrong kind in a stage with collected pairs is refused by its field."""
    plain["stages"][stage] |= fields
    problems = said(plain)
    assert any(problem.startswith(message) for problem in problems), problems


def test_what_is_collected_is_not_published(plain: dict[str, Any]) -> None:
    plain["publish"][0]["stage"] = "sampled"
    (problem,) = said(plain)
    assert problem.startswith("publish.0.stage: 'sampled' is a preference_collection stage; a stage is a ")


# -- rings


def test_a_ring_through_collected_preferences_is_named_in_full(plain: dict[str, Any]) -> None:
    plain["stages"]["sampled"] |= {"policy": "direct", "judge": {"verifier": "arithmetic"}}
    assert said(plain) == [
        "stages.sampled.policy: stages wait for one another: sampled reads direct (stages.sampled.policy), "
        "direct reads sampled (stages.direct.data); name a stage before them in one of these fields"
    ]


def test_a_ring_through_its_judge_is_found(plain: dict[str, Any]) -> None:
    plain["rewards"]["main"]["terms"] = [{"model": "taste"}]
    plain["stages"] |= {"value": {**plain["stages"]["value"], "reward": "own"},
                        "policy": {**plain["stages"]["policy"], "reward": "own"}}  # fmt: skip
    plain["rewards"]["own"] = {"terms": [{"model": "reward"}]}
    assert said(plain) == [
        "stages.taste.data: stages wait for one another: taste reads sampled (stages.taste.data), "
        "sampled reads taste (rewards.main.terms.0.model); name a stage before them in one of these fields"
    ]


# -- one name, two things


def test_a_dataset_and_a_collection_cannot_share_a_name(plain: dict[str, Any]) -> None:
    plain["data"]["sampled"] = {"source": "builtin:arithmetic/preferences"}
    assert said(plain) == [
        "stages.sampled: a dataset is called 'sampled' too, and both are read as data; give the stage another name"
    ]


@pytest.mark.parametrize("shared", ["reward", "value", "sft"])
def test_a_dataset_may_be_called_like_another_stage(plain: dict[str, Any], shared: str) -> None:
    plain["data"][shared] = plain["data"].pop("pairs")
    plain["stages"]["reward"]["data"] = shared
    assert said(plain) == []
    recipe = Recipe.model_validate(plain)
    assert dependencies(recipe)["reward"]["data"] == f"data.{shared}"
    assert ordered_steps(recipe).index(f"data.{shared}") < ordered_steps(recipe).index("reward")


def test_a_stage_may_read_data_of_its_own_name(plain: dict[str, Any]) -> None:
    plain["data"]["direct"] = {"source": "builtin:arithmetic/preferences"}
    plain["stages"]["direct"]["data"] = "direct"
    assert said(plain) == []
    assert dependencies(Recipe.model_validate(plain))["direct"]["data"] == "data.direct"
