"""A critic learns the return that the policy will see, or the recipe is refused."""

from typing import Any

import pytest

from schemas.agreement import resolve
from schemas.recipe import PolicyOptimization, Recipe, ValuePretraining


def resolved(plain: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    recipe, problems = resolve(Recipe.model_validate(plain))
    return recipe.stages, [str(problem) for problem in problems]


def test_what_is_inherited_is_written_out(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["algorithm"] = {"preset": "ppo", "gamma": 0.99}
    stages, problems = resolved(plain)
    value, policy = stages["value"], stages["policy"]
    assert isinstance(value, ValuePretraining)
    assert isinstance(policy, PolicyOptimization)
    assert problems == []
    assert (value.kl_coef, value.gamma) == (0.05, 0.99)
    assert (value.reference, policy.reference) == ("sft", "sft")


def test_a_resolved_recipe_resolves_to_itself(plain: dict[str, Any]) -> None:
    recipe, _ = resolve(Recipe.model_validate(plain))
    assert resolve(recipe) == (recipe, [])


def test_stages_other_than_critics_and_policies_stay(plain: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(plain)
    after, _ = resolve(recipe)
    assert {n: s for n, s in after.stages.items() if n not in ("value", "policy")} == {
        n: s for n, s in recipe.stages.items() if n not in ("value", "policy")
    }


@pytest.mark.parametrize(
    ("stage", "fields", "said"),
    [
        ("value", {"reward": "other"},
         "stages.value.reward: 'other' is not the reward of 'policy' ('main'), which starts from it; "
         "use one reward in both"),
        ("value", {"kl_coef": 0.1},
         "stages.value.kl_coef: 0.1 is not the kl_coef of 'policy' (0.05), which starts from this critic; "
         "leave kl_coef out here, to inherit it"),
        ("value", {"gamma": 0.9},
         "stages.value.gamma: 0.9 is not the gamma of 'policy' (1), which starts from this critic; "
         "leave gamma out here, to inherit it"),
        ("value", {"reference": "model"},
         "stages.value.reference: 'model' is not the reference of 'policy' ('sft'), whose reward counts KL; "
         "set reference: sft"),
        ("policy", {"reference": "model"},
         "stages.value.reference: 'sft' is not the reference of 'policy' ('model'), whose reward counts KL; "
         "set reference: model"),
    ],
)  # fmt: skip
def test_disagreements(plain: dict[str, Any], stage: str, fields: dict[str, Any], said: str) -> None:
    plain["rewards"]["other"] = {"terms": [{"model": "reward", "weight": 2.0}]}
    plain["stages"]["policy"]["algorithm"] = "ppo"
    plain["stages"][stage] |= fields
    assert resolved(plain)[1] == [said]


def test_rewards_of_two_names_may_be_the_same(plain: dict[str, Any]) -> None:
    plain["rewards"]["other"] = plain["rewards"]["main"]
    plain["stages"]["value"]["reward"] = "other"
    assert resolved(plain)[1] == []


@pytest.mark.parametrize(
    "change", [{"missing_eos": {"subtract": 1.0}}, {"terms": [{"model": "reward", "weight": 2}]}]
)
def test_every_part_of_a_reward_counts(plain: dict[str, Any], change: dict[str, Any]) -> None:
    plain["rewards"]["other"] = {**plain["rewards"]["main"], **change}
    plain["stages"]["value"]["reward"] = "other"
    assert len(resolved(plain)[1]) == 1


def test_without_a_kl_part_references_may_differ(plain: dict[str, Any]) -> None:
    plain["stages"]["value"]["reference"] = "model"
    assert resolved(plain)[1] == []


def test_two_heirs_must_agree(plain: dict[str, Any]) -> None:
    plain["stages"]["gentle"] = {**plain["stages"]["policy"], "algorithm": "ppo"}
    assert resolved(plain)[1] == [
        "stages.value.kl_coef: is to be that of the policy stages that start from this critic, but they differ: "
        "policy has 0, gentle has 0.05; use one kl_coef in all, or pretrain a critic for each"
    ]


def test_a_critic_without_heirs_says_itself(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["critic"] = "reward"
    assert resolved(plain)[1] == [
        f"stages.value.{field}: is left out, and no policy_optimization stage starts from this critic that could "
        f"give it; set {field} here"
        for field in ("kl_coef", "gamma")
    ]
    plain["stages"]["value"] |= {"kl_coef": 0.0, "gamma": 1.0}
    assert resolved(plain)[1] == []
