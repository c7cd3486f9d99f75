"""Learning rates that a recipe leaves open follow a hand-worked rule, and are written out."""

from pathlib import Path

import pytest
import yaml

from vantage.schemas.kinds import KINDS
from vantage.schemas.loading.recipe_file import builtin_recipes, parse_recipe
from vantage.schemas.recipe.learning_rates import (
    rate_for,
    unset_rates,
    with_learning_rates,
)
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.records.stage_key import key_parts

TEXT = """
recipe: open
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
  preferences: {source: "builtin:arithmetic/preferences"}
  prompts: {source: "builtin:arithmetic/prompts"}
rewards: {main: {terms: [{model: reward}]}}
stages:
  sft: {kind: sft, data: demonstrations}
  reward: {kind: reward_model, init: sft, data: preferences}
  value: {kind: value_pretraining, policy: sft, init: reward, reward: main, prompts: prompts, learning_rate: 3e-4}
  policy: {kind: policy_optimization, algorithm: vapo, init: sft, critic: value, reward: main, prompts: prompts, batch_size: 256}
  plain: {kind: policy_optimization, algorithm: grpo, init: sft, reward: main, prompts: prompts, batch_size: 256}
  direct: {kind: dpo, init: sft, data: preferences}
"""


@pytest.mark.parametrize(
    "kind, field, width, by_hand",
    [
        ("sft", "learning_rate", 4096, 2e-5),  # as published
        ("sft", "learning_rate", 64, 1.3e-3),  # · 64 = 1.28e-3
        ("sft", "learning_rate", 576, 1.4e-4),  # · 7.11 = 1.42e-4
        ("reward_model", "learning_rate", 8192, 5e-6),
        ("dpo", "learning_rate", 4096, 5e-7),
        ("policy_optimization", "learning_rate", 128, 3.2e-5),
        ("policy_optimization", "critic_learning_rate", 128, 6.4e-5),
    ],
)
def test_the_rule_by_hand(kind: str, field: str, width: int, by_hand: float) -> None:
    assert rate_for(kind, field, width=width) == by_hand


def rates(recipe: Recipe) -> dict[str, float | None]:
    trained = {name: stage for name, stage in recipe.stages.items() if isinstance(stage, Training)}
    return {name: stage.learning_rate for name, stage in trained.items()}


def test_what_is_left_open_is_written_out_and_what_is_given_stays() -> None:
    recipe = parse_recipe(TEXT)
    assert set(unset_rates(recipe)) == {
        ("sft", "learning_rate"),
        ("reward", "learning_rate"),
        ("policy", "learning_rate"),
        ("policy", "critic_learning_rate"),
        ("plain", "learning_rate"),
        ("direct", "learning_rate"),
    }
    resolved = with_learning_rates(recipe, width=128)
    assert rates(resolved) == {
        "sft": 6.4e-4,
        "reward": 3.2e-4,
        "value": 3e-4,
        "policy": 3.2e-5,
        "plain": 3.2e-5,
        "direct": 1.6e-5,
    }
    policy, plain = resolved.stages["policy"], resolved.stages["plain"]
    assert isinstance(policy, PolicyOptimization) and policy.critic_learning_rate == 6.4e-5
    assert isinstance(plain, PolicyOptimization) and plain.critic_learning_rate is None, "it has no critic"
    assert not list(unset_rates(resolved))
    assert with_learning_rates(resolved, width=4096) == resolved


def test_the_rate_that_was_chosen_is_in_the_stage_key() -> None:
    recipe = parse_recipe(TEXT)

    def configuration(width: int) -> dict[str, object]:
        resolved = with_learning_rates(recipe, width=width)
        parts = key_parts(
            resolved.stages["sft"],
            generation=resolved.generation,
            rewards={},
            seed=1,
            inputs={"init": "a" * 64, "data": "b" * 64},
            extra={},
        )
        told: dict[str, object] = parts["configuration"]
        return told

    assert configuration(128)["learning_rate"] == 6.4e-4
    assert configuration(256)["learning_rate"] == 3.2e-4


def test_every_kind_that_trains_has_a_published_rate() -> None:
    for name, kind in KINDS.items():
        assert (kind.learning_rate is not None) == issubclass(kind.work, Training), name
        assert (kind.critic_learning_rate is not None) == (
            "critic_learning_rate" in kind.work.model_fields
        ), name


def test_only_the_recipes_for_models_of_ones_own_leave_rates_open() -> None:
    """The others are for one model each, and were tuned to it."""
    folder = Path(__file__).parents[3] / "recipes"
    left_open = set()
    for name in builtin_recipes():
        stages = yaml.safe_load((folder / f"{name}.yaml").read_text()).get("stages", {})
        if any(
            KINDS[stage["kind"]].learning_rate and "learning_rate" not in stage for stage in stages.values()
        ):
            left_open.add(name)
    assert left_open == {"instruct", "dpo", "best_of_n", "zh_rlhf", "rloo_sentiment", "gsm8k_vapo"}
