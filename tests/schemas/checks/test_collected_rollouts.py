"""What a stage reads of collected responses is about its own prompts, reward and policy, or the recipe is refused."""

from typing import Any

import pytest
import yaml

from tests.support.every import every
from vantage.schemas.checks.agreement import resolve
from vantage.schemas.checks.few_prompts import few_prompts
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.steps import dependencies, ordered_steps

COLLECTED = {
    "kind": "rollout_collection", "policy": "sft", "prompts": "tasks", "reward": "main", "samples_per_prompt": 4,
}  # fmt: skip
OFFLINE = {"batch_size": 64, "minibatch_size": 32, "rollouts": "collected"}
READERS: dict[str, dict[str, Any]] = {
    "value": {**OFFLINE, "kind": "value_pretraining", "policy": "sft", "init": "reward", "reward": "main",
              "prompts": "tasks"},
    "best": {**OFFLINE, "kind": "best_of_n", "init": "sft", "reward": "main", "prompts": "tasks",
             "samples_per_prompt": 4, "minibatch_size": 8},
    "dpo": {"kind": "dpo", "init": "sft", "rollouts": "collected"},
    "policy": {**OFFLINE, "kind": "policy_optimization", "algorithm": "pvpo", "init": "sft", "reward": "main",
               "prompts": "tasks"},
}  # fmt: skip


@pytest.fixture
def plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the small recipe's model, data and reward model, with every stage that reads collected responses."""
    stages = {name: plain["stages"][name] for name in ("sft", "reward")}
    plain["data"]["others"] = {"source": "builtin:arithmetic/prompts", "rows": 100}
    plain["rewards"]["other"] = {"terms": [{"verifier": "arithmetic"}]}
    del plain["publish"]
    readers = {name: dict(stage) for name, stage in READERS.items()}
    return {**plain, "stages": {**stages, "collected": dict(COLLECTED), **readers}}


def problems_of(plain: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in resolve(Recipe.model_validate(plain))[1]]


def test_every_reader_depends_on_the_collection(plain: dict[str, Any]) -> None:
    assert problems_of(plain) == []
    recipe = parse_recipe(yaml.safe_dump(plain))
    for name in READERS:
        assert dependencies(recipe)[name]["rollouts"] == "collected"
    order = ordered_steps(recipe)
    assert all(order.index("collected") < order.index(name) for name in READERS)
    assert "data" not in dependencies(recipe)["dpo"]


def test_what_is_left_open_is_written_out(plain: dict[str, Any]) -> None:
    stages = resolve(Recipe.model_validate(plain))[0].stages
    assert stages["collected"].held_out_samples_per_prompt == 4  # type: ignore[union-attr]


@every("reader", ["value", "best", "policy"])
@every(
    ("field", "other", "said"),
    [
        ("reward", "other", "'other' is not the reward by which 'collected' was scored ('main'); use one reward in both"),
        ("prompts", "others", "'others' is not the dataset whose prompts 'collected' has responses to ('tasks'); set "
         "prompts: tasks"),
    ],
)  # fmt: skip
def test_prompts_and_reward_are_those_of_the_collection(
    plain: dict[str, Any], reader: str, field: str, other: str, said: str
) -> None:
    plain["stages"][reader][field] = other
    assert problems_of(plain) == [f"stages.{reader}.{field}: {said}"]


def test_equal_rewards_of_two_names_agree(plain: dict[str, Any]) -> None:
    plain["rewards"]["same"] = dict(plain["rewards"]["main"])
    plain["stages"]["value"]["reward"] = "same"
    assert problems_of(plain) == []


def test_a_critic_learns_the_returns_of_one_policy(plain: dict[str, Any]) -> None:
    plain["stages"]["value"]["policy"] = "dpo"
    assert problems_of(plain) == [
        "stages.value.rollouts: 'collected' holds responses of 'sft', and this critic learns the returns of 'dpo'; "
        "set policy: sft"
    ]


@pytest.mark.parametrize(("algorithm", "what"), [("pvpo", "mean score"), ("a_star_po", "optimal value")])
def test_the_reference_s_baseline_is_made_of_its_responses(
    plain: dict[str, Any], algorithm: str, what: str
) -> None:
    plain["stages"]["policy"] |= {"algorithm": algorithm, "minibatch_size": 64, "reference": "model"}
    advantage = {"pvpo": "reference_mean", "a_star_po": "optimal_value"}[algorithm]
    assert problems_of(plain) == [
        f"stages.policy.rollouts: 'collected' holds responses of 'sft', and advantage={advantage} needs the {what} of the "
        "reference ('model'); collect those of 'model', or set reference"
    ]


def test_a_tracked_mean_may_begin_with_any_policy_s(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"] |= {"algorithm": "spo", "reference": "model"}
    assert problems_of(plain) == []


def test_the_best_of_more_than_there_are(plain: dict[str, Any]) -> None:
    plain["stages"]["best"] |= {"samples_per_prompt": 8, "batch_size": 64}
    assert problems_of(plain) == [
        "stages.best.samples_per_prompt: 8 is more than the 4 responses that 'collected' has of each prompt; use 4 or "
        "less, or raise it there"
    ]


@pytest.mark.parametrize("fewest", [{"samples_per_prompt": 1}, {"held_out_samples_per_prompt": 1}])
def test_a_pair_takes_two(plain: dict[str, Any], fewest: dict[str, int]) -> None:
    plain["stages"]["collected"] |= fewest
    plain["stages"]["best"]["samples_per_prompt"] = 2
    if "samples_per_prompt" in fewest:
        del plain["stages"]["best"]
    assert problems_of(plain) == [
        "stages.dpo.rollouts: a pair takes two responses to a prompt, and 'collected' has one; raise samples_per_prompt "
        "of 'collected' (and held_out_samples_per_prompt, if it is set)"
    ]


@every(
    ("stage", "changes", "said"),
    [
        ("value", {"rollouts": None, "fresh_share": 0.5}, "add rollouts, or leave fresh_share out"),
        ("value", {"samples_per_prompt": 2}, "leave samples_per_prompt out, or set fresh_share"),
        ("value", {"samples_per_prompt": 4, "fresh_share": 0.2}, "is 13 responses, not a multiple of samples_per_prompt=4"),
        ("dpo", {"data": "pairs"}, "give exactly one of them"),
        ("dpo", {"rollouts": None}, "give exactly one of them"),
        ("policy", {"rollouts": None}, "name a rollout_collection stage as rollouts"),
        ("policy", {"algorithm": {"preset": "spo", "reward_scaling": "scale"}}, "set reward_scaling: none"),
        ("policy", {"algorithm": {"preset": "spo", "tracker_memory_low": 0.98}}, "is above tracker_memory_high=0.96"),
    ],
)  # fmt: skip
def test_fields_of_one_stage_that_do_not_fit(
    plain: dict[str, Any], stage: str, changes: dict[str, Any], said: str
) -> None:
    plain["stages"][stage] |= changes
    with pytest.raises(ValueError, match=said):
        Recipe.model_validate(plain)


def test_a_stage_of_another_kind_is_refused_by_name(plain: dict[str, Any]) -> None:
    plain["stages"]["value"]["rollouts"] = "sft"
    with pytest.raises(ValueError, match="'sft' is an sft stage; rollouts names a rollout_collection stage"):
        parse_recipe(yaml.safe_dump(plain))


def test_responses_that_the_algorithm_does_not_read_are_no_input(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"] |= {"algorithm": "reinforce_pp"}
    recipe, problems = resolve(Recipe.model_validate(plain))
    assert problems == []
    assert "rollouts" not in dependencies(recipe)["policy"]


def test_gates_of_dpo_know_how_many_prompts_were_collected(plain: dict[str, Any]) -> None:
    plain["data"]["tasks"]["split"] = {"validation": 12, "test": 12}
    plain["stages"]["dpo"]["gate"] = {"metric": "pair_accuracy", "at_least": 0.6}
    recipe, _ = resolve(Recipe.model_validate(plain))
    [said] = few_prompts(recipe, dependencies(recipe), {})
    assert said.startswith("stages.dpo.gate: pair_accuracy is measured on 12 prompts at most")


def test_nothing_else_is_warned_of(plain: dict[str, Any]) -> None:
    recipe, _ = resolve(Recipe.model_validate(plain))
    assert set(warnings(recipe, dependencies(recipe))) == {
        "data.others: no stage reads it",
        "rewards.other: no stage reads it",
        "stages.value: no policy_optimization stage starts from this critic",
    }
