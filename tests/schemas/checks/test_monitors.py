"""Monitors of a policy stage in a recipe are refused where they are wrong, and enter the stage's key."""

from typing import Any

import pytest

from vantage.attempts.jobs import key_parts_of
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies

DIGESTS = dict.fromkeys(("init", "reference", "critic", "prompts", "reward.main.0"), "0" * 64)


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as refused:
        parse_recipe(text, overrides=list(overrides))
    return [str(problem) for problem in refused.value.problems]


def test_a_reward_without_a_model_has_no_scores_to_compare(text: str) -> None:
    found = problems(
        text,
        "stages.policy.preferences=pairs",
        "rewards.main={terms: [{verifier: arithmetic}]}",
        "stages.value.gate=[]",
    )
    assert any(
        "stages.policy.preferences=pairs: the scores of reward models are compared with those of 'pairs', and the reward 'main' has "
        "no model" in each
        for each in found
    ), found


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stages.policy.demonstrations=pairs", "stages.policy.demonstrations"),
        ("stages.policy.preferences=demos", "stages.policy.preferences"),
        ("stages.policy.preferences=nobody", "stages.policy.preferences=nobody: no "),
    ],
)
def test_data_of_another_kind_is_refused(text: str, override: str, said: str) -> None:
    assert any(said in each for each in problems(text, override))


@pytest.mark.parametrize(
    ("metric", "field"),
    [("demonstration_nll_rise", "demonstrations"), ("reward_data_distance", "preferences")],
)
def test_a_guard_on_what_is_not_measured_is_refused(text: str, metric: str, field: str) -> None:
    guard = f"stages.policy.guards={{metric: {metric}, above: 1}}"
    found = problems(text, guard)
    said = f"{metric} is measured only where the stage names {field}; name a dataset as {field}, or leave the guard out"
    assert any(said in each for each in found), found
    data = {"demonstrations": "demos", "preferences": "pairs"}[field]
    assert parse_recipe(text, overrides=[guard, f"stages.policy.{field}={data}"])


def test_what_is_read_is_in_the_key_and_a_recipe_that_asks_for_nothing_keeps_its_own(text: str) -> None:
    def parts_of(*overrides: str, **inputs: str) -> dict[str, Any]:
        recipe = parse_recipe(text, overrides=list(overrides))
        return key_parts_of(recipe, "policy", DIGESTS | inputs, source={}, facts={})

    plain = parts_of()
    assert "demonstrations" not in str(plain)
    assert "preferences" not in str(plain)
    one, other = (
        parts_of(
            "stages.policy.demonstrations=demos",
            "stages.policy.preferences=pairs",
            demonstrations=each,
            preferences="2" * 64,
        )
        for each in ("1" * 64, "3" * 64)
    )
    assert one["inputs"] == plain["inputs"] | {"demonstrations": "1" * 64, "preferences": "2" * 64}
    assert one["configuration"] == plain["configuration"], "the names are in no key"
    assert len({stage_key(each) for each in (plain, one, other)}) == 3


def test_the_stage_waits_for_the_data(text: str) -> None:
    recipe = parse_recipe(
        text, overrides=["stages.policy.demonstrations=demos", "stages.policy.preferences=pairs"]
    )
    read = dependencies(recipe)["policy"]
    assert (read["demonstrations"], read["preferences"]) == ("data.demos", "data.pairs")
