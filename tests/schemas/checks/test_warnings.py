"""What is allowed but unwise gives a warning: each appears for its cause and for nothing else.

What a policy stage's switches are warned of is in test_algorithm_cautions.py.
"""

from typing import Any

import pytest

from vantage.schemas.checks.warnings import warnings
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.steps import dependencies


def warned(plain: dict[str, Any]) -> list[str]:
    recipe = Recipe.model_validate(plain)
    return warnings(recipe, dependencies(recipe))


@pytest.fixture
def plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the small recipe with responses long enough for the preset's α."""
    return {**plain, "generation": {"max_response_tokens": 512}}


def test_a_sound_recipe_has_none(plain: dict[str, Any]) -> None:
    assert warned(plain) == []


def test_what_no_stage_reads(plain: dict[str, Any]) -> None:
    plain["data"]["spare"] = plain["data"]["demos"]
    plain["rewards"]["spare"] = plain["rewards"]["main"]
    assert warned(plain) == ["data.spare: no stage reads it", "rewards.spare: no stage reads it"]


def test_a_critic_that_no_policy_starts_from(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"] |= {"critic": None, "fresh_critic": "sft"}
    assert warned(plain) == ["stages.value: no policy_optimization stage starts from this critic"]


def test_a_gated_critic_of_a_verifier(plain: dict[str, Any]) -> None:
    plain["rewards"]["main"]["terms"] = [{"verifier": "arithmetic"}]
    assert warned(plain) == []


def test_a_gated_critic_of_an_ungated_reward_model(plain: dict[str, Any]) -> None:
    del plain["stages"]["reward"]["gate"]
    assert warned(plain) == [
        "stages.value.gate: scores of a reward model at chance level can be predicted well too; "
        "give stages.reward a gate on pair_accuracy"
    ]
    del plain["stages"]["value"]["gate"]
    assert warned(plain) == []


def test_a_comparison_with_itself(plain: dict[str, Any]) -> None:
    plain["stages"]["evaluation"]["baseline"] = "policy"
    assert warned(plain) == ["stages.evaluation.baseline: 'policy' is compared with itself"]


def test_an_alias_held_back_by_a_gate_that_is_not_about_it(plain: dict[str, Any]) -> None:
    plain["publish"][0]["after"] = "reward"
    assert warned(plain) == [
        "publish.0.after: 'reward' does not read 'policy', so its gate does not judge it"
    ]
    plain["publish"][0] = {"stage": "sft", "registered_model": "m", "alias": "a", "after": "reward"}
    assert warned(plain) == []


@pytest.mark.parametrize(
    "publication",
    [
        {"stage": "policy", "registered_model": "m"},
        {"stage": "policy", "registered_model": "m", "alias": "a"},
        {"stage": "reward", "registered_model": "m", "alias": "a", "after": "reward"},
    ],
)
def test_an_alias_that_nothing_else_holds_back(plain: dict[str, Any], publication: dict[str, str]) -> None:
    plain["publish"] = [publication]
    assert warned(plain) == []


def test_margins_that_dpo_does_not_read(plain: dict[str, Any]) -> None:
    pairs = {"source": "pairs.jsonl", "columns": {"margin": "gap"}}
    plain["data"]["graded"] = pairs
    plain["stages"]["dpo"] = {"kind": "dpo", "init": "sft", "data": "graded"}
    assert warned(plain) == [
        "stages.dpo.data: the margins of 'graded' are not read by DPO (arXiv 2305.18290 has none); "
        "a reward_model reads them, or remove data.graded.columns.margin"
    ]
    pairs["columns"] = {}
    assert warned(plain) == []
