"""A recipe has the right steps, each reads the right inputs, and they are ordered so that they can run."""

from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from vantage.schemas.kinds import KINDS, STAGES, kinds_collecting, kinds_making
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.metrics import METRICS
from vantage.schemas.steps import (
    BUILTIN_VERIFIERS,
    CONTENT_COLUMNS,
    WATCH_PROMPTS,
    content_of,
    dependencies,
    ordered_steps,
    rewards_read,
    stage_reference,
)

ROOT = Path(__file__).parents[2]
ARTIFACTS = {each.model_fields["kind"].default for each in get_args(get_args(Artifact)[0])}


def test_every_step_and_the_role_of_each_input(plain: dict[str, Any]) -> None:
    assert dependencies(Recipe.model_validate(plain)) == {
        "model": {},
        "data.demos": {},
        "data.pairs": {},
        "data.tasks": {},
        "sft": {"init": "model", "data": "data.demos"},
        "reward": {"init": "sft", "data": "data.pairs", "centre_on": "data.demos"},
        "value": {
            "policy": "sft",
            "init": "reward",
            "reference": "sft",
            "prompts": "data.tasks",
            "reward.main.0": "reward",
        },
        "policy": {
            "init": "sft",
            "reference": "sft",
            "critic": "value",
            "prompts": "data.tasks",
            "reward.main.0": "reward",
        },
        "evaluation": {"candidate": "policy", "baseline": "sft", "prompts": "data.tasks"},
    }


def test_a_reward_that_judges_is_read_by_the_evaluation(plain: dict[str, Any]) -> None:
    plain["stages"]["evaluation"]["judge"] = {"reward": "main"}
    plain["rewards"]["main"]["terms"] = [{"verifier": "arithmetic"}, {"model": "reward", "weight": 2}]
    inputs = dependencies(Recipe.model_validate(plain))["evaluation"]
    assert inputs == {
        "candidate": "policy",
        "baseline": "sft",
        "prompts": "data.tasks",
        "reward.main.1": "reward",
    }


def test_a_named_reference_is_read(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["reference"] = "model"
    recipe = Recipe.model_validate(plain)
    assert dependencies(recipe)["policy"]["reference"] == "model"
    assert stage_reference(recipe.stages["policy"]) == "model"
    assert stage_reference(recipe.stages["value"]) == "sft"


def test_a_fresh_critic_and_demonstrations_for_ptx_are_read(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"] |= {"critic": None, "fresh_critic": "model", "ptx": "demos"}
    inputs = dependencies(Recipe.model_validate(plain))["policy"]
    assert (inputs["fresh_critic"], inputs["ptx"]) == ("model", "data.demos")
    assert "critic" not in inputs


def test_rankings_are_read_in_the_place_of_pairs(plain: dict[str, Any]) -> None:
    plain["data"]["ranked"] = {"source": "ranked.jsonl"}
    plain["stages"]["reward"] = {"kind": "reward_model", "init": "sft", "rankings": "ranked"}
    recipe = Recipe.model_validate(plain)
    assert dependencies(recipe)["reward"] == {"init": "sft", "rankings": "data.ranked"}
    assert content_of(recipe, "ranked") == "rankings"
    assert "data.pairs" not in dependencies(recipe)


def test_the_best_of_several_is_chosen_by_a_reward(plain: dict[str, Any]) -> None:
    plain["stages"]["best"] = {"kind": "best_of_n", "init": "sft", "reward": "main", "prompts": "tasks"}
    recipe = Recipe.model_validate(plain)
    assert dependencies(recipe)["best"] == {"init": "sft", "prompts": "data.tasks", "reward.main.0": "reward"}
    assert rewards_read(recipe.stages["best"]) == ("main",)


def test_what_no_stage_reads_is_no_step(plain: dict[str, Any]) -> None:
    plain["data"]["spare"] = plain["data"]["demos"]
    assert "data.spare" not in dependencies(Recipe.model_validate(plain))


def test_the_model_is_a_step_only_where_it_is_read(plain: dict[str, Any]) -> None:
    only_evaluation = {**plain, "publish": [], "rewards": {}}
    only_evaluation["stages"] = {
        "evaluation": {**plain["stages"]["evaluation"], "candidate": "model", "baseline": "model"}
    }
    assert list(dependencies(Recipe.model_validate(only_evaluation))) == ["model", "data.tasks", "evaluation"]


def test_order_follows_inputs_and_otherwise_the_recipe(plain: dict[str, Any]) -> None:
    plain["stages"] = dict(reversed(plain["stages"].items()))
    plain["stages"]["second"] = {"kind": "sft", "data": "demos"}
    steps = ordered_steps(Recipe.model_validate(plain))
    assert steps[:4] == ["model", "data.demos", "data.pairs", "data.tasks"]
    assert steps[4:] == ["sft", "reward", "value", "policy", "evaluation", "second"]


def test_order_refuses_a_ring(plain: dict[str, Any]) -> None:
    plain["stages"]["sft"]["init"] = "policy"
    with pytest.raises(
        ValueError, match="stages wait for one another: sft, reward, value, policy, evaluation"
    ):
        ordered_steps(Recipe.model_validate(plain))


def test_data_holds_what_its_readers_read_it_as(plain: dict[str, Any]) -> None:
    plain["stages"]["evaluation"]["prompts"] = "demos"
    plain["data"]["spare"] = plain["data"]["demos"]
    recipe = Recipe.model_validate(plain)
    contents = [content_of(recipe, name) for name in ("demos", "pairs", "tasks")]
    assert contents == ["demonstrations", "preferences", "prompts"]
    with pytest.raises(ValueError, match=r"data.spare is read by no stage"):
        content_of(recipe, "spare")


def test_the_rewards_of_a_stage(plain: dict[str, Any]) -> None:
    stages = Recipe.model_validate(plain).stages
    assert {name: rewards_read(stage) for name, stage in stages.items()} == {
        "sft": (),
        "reward": (),
        "value": ("main",),
        "policy": ("main",),
        "evaluation": (),
    }


def test_the_tables_name_fields_that_exist() -> None:
    for name, kind in STAGES.items():
        assert set(kind.roles) - {WATCH_PROMPTS} <= set(kind.work.model_fields), name
        assert (WATCH_PROMPTS in kind.roles) == ("watch" in kind.work.model_fields), name
        assert ("reference" in kind.reads) == (kind.reference_from is not None), name
        assert kind.reference_from is None or kind.reference_from in kind.reads, name
        assert {"microbatch_size", "microbatch_tokens"} <= set(kind.work.model_fields), name
    assert {content for kind in STAGES.values() for content in kind.data.values()} == set(CONTENT_COLUMNS)


def test_every_row_is_about_a_class_a_module_and_metrics_that_exist() -> None:
    metrics = {metric.name for metric in METRICS}
    for name, kind in KINDS.items():
        assert (ROOT / f"{kind.module.replace('.', '/')}.py").is_file(), name
        assert {*kind.headline, *kind.curves} <= metrics, name
        assert len(set(kind.headline)) == len(kind.headline), name
        assert issubclass(kind.work, Stage) != kind.is_implicit, name
        assert kind.imports is None or kind.imports in kind.work.model_fields, name
        assert kind.makes in ARTIFACTS, name
    of_modules = Counter(kind.module for kind in KINDS.values())
    shared = {module for module, count in of_modules.items() if count > 1}
    assert shared == {"vantage.tasks.merge_adapters"}  # what it makes is of the kind of model that it merges


def test_which_stages_a_field_may_name() -> None:
    assert kinds_making(("policy",)) == (
        "model",
        "sft",
        "dpo",
        "kto",
        "policy_optimization",
        "best_of_n",
        "distillation",
    )
    assert kinds_making(("value_model", "reward_model")) == ("value_pretraining", "reward_model")
    assert [name for name, kind in KINDS.items() if kind.is_published] == [
        "sft", "reward_model", "dpo", "kto", "policy_optimization", "best_of_n", "distillation",
    ]  # fmt: skip
    assert kinds_collecting("preferences") == ("preference_collection",)
    assert kinds_collecting("prompts") == ("prompt_selection",)


def test_every_verifier_that_can_be_named_exists() -> None:
    from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS as IMPLEMENTED

    assert set(BUILTIN_VERIFIERS) == set(IMPLEMENTED)
