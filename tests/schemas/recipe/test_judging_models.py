"""Terms that a language model of the run scores: what a recipe may contain, what is in a stage's key, and how names are resolved."""

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from vantage.estimates.recipe_estimate import estimate_recipe
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.judging_models import JudgingModel
from vantage.schemas.recipe.resolved import ResolvedRolloutCollection
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.terms import JudgeTerm, JudgingModelTerm
from vantage.schemas.records.stage_key import differences, key_parts
from vantage.schemas.steps import dependencies, reward_imports

JUDGE = {"model": "grader"}


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"judge": JUDGE, "length": "linear"}, "a judge, a reward server (http) or a length; give exactly"),
        ({"judge": {**JUDGE, "prompt": "Good? {prompt}"}}, "prompt has no {response}; write each field"),
        ({"judge": {**JUDGE, "prompt": "{prompt}{response}", "criteria": {"a": "?"}}}, "has no {criterion}"),
        ({"judge": {**JUDGE, "against": "answer", "prompt": "{prompt}"}}, "no {first} and no {second}"),
        ({"judge": {**JUDGE, "scale": [5, 1]}}, "scale=[5, 1] does not ascend"),
        ({"judge": {**JUDGE, "scale": [0, 100]}}, "scale=[0, 100] has 101 numbers"),
        ({"judge": {**JUDGE, "scale": [1.5, 2.5]}}, "Input should be a valid integer"),
        ({"judge": {**JUDGE, "against": "answer", "scale": [1, 5]}}, "scale is read only without against"),
        ({"judge": {**JUDGE, "unreadable": 0.0}}, "unreadable=0 is read only where an answer can be"),
        ({"judge": {**JUDGE, "temperature": 1.0}}, "Extra inputs are not permitted"),
        (
            {"judge": {**JUDGE, "criteria": {"a": "?"}}, "whiten": True},
            "clip, offset and whiten apply to one",
        ),
        ({"judge": {**JUDGE, "criteria": {"a": "?"}}, "scores": {"b": {}}}, "scores names b"),
        ({"judge": {}}, "Field required"),
        ({"judge": "grader"}, "Input should be a valid dictionary or instance of JudgeServer"),
    ],
)
def test_contradictions_are_refused(term: dict[str, Any], message: str) -> None:
    """Fields of a judge that contradict one another are refused."""
    with pytest.raises(ValidationError) as refused:
        Reward.model_validate({"terms": [term]})
    assert message in str(refused.value)


def test_an_address_makes_it_a_judge_at_a_server() -> None:
    whole = Reward.model_validate(
        {"terms": [{"judge": JUDGE}, {"judge": {**JUDGE, "name": "far", "url": "http://127.0.0.1:1"}}]}
    )
    assert [type(term) for term in whole.terms] == [JudgingModelTerm, JudgeTerm]
    assert Reward.model_validate_json(whole.model_dump_json()) == whole, "as it goes to the stage's process"


def parts(judge: dict[str, Any], digest: str = "c" * 64) -> dict[str, Any]:
    fields = {"policy": "model", "prompts": "prompts", "reward": "main", "samples_per_prompt": 2}
    work = ResolvedRolloutCollection.model_validate(
        {"kind": "rollout_collection", **fields, "held_out_samples_per_prompt": 2}
    )
    inputs = {"policy": "a" * 64, "prompts": "b" * 64, "reward.main.0": digest}
    rewards = {"main": Reward.model_validate({"terms": [{"judge": judge}]})}
    return key_parts(work, generation=Generation(), rewards=rewards, seed=1, inputs=inputs, extra={})


CHANGES: dict[str, Any] = {
    "name": "x",
    "criteria": {"kind": "?"},
    "against": "answer",
    "prompt": "{prompt} {response}",
    "scale": [0, 9],
    "least_probability": 0.5,
    "unreadable": 1.0,
}


def test_the_key_holds_the_models_digest_and_every_field() -> None:
    before = parts(JUDGE)
    assert parts({"model": "another_name"}) == before
    assert differences(before, parts(JUDGE, "d" * 64)) == [
        "rewards.reward.terms.0.judge.model: cccccccccccc → dddddddddddd"
    ]
    (term,) = before["rewards"]["reward"]["terms"]
    assert "[Response]\n{response}" in term["judge"]["prompt"]
    least = {"least_probability": 0.1}
    before = parts({**JUDGE, **least})
    for field, value in CHANGES.items():
        changed = differences(before, parts({**JUDGE, **least, field: value}))
        assert any(f".judge.{field}" in each for each in changed), field
    assert {"model", *CHANGES} == JudgingModel.model_fields.keys()


TEXT = """
recipe: judged
seed: 1
model: {source: "builtin:tiny"}
models: {grader: {source: "builtin:tiny"}}
generation: {max_prompt_tokens: 48, max_response_tokens: 24}
data:
  prompts: {source: "builtin:arithmetic/prompts", rows: 64, split: {validation: 16, test: 8}}
  demos: {source: "builtin:arithmetic/demonstrations", rows: 64}
  pairs: {source: "builtin:arithmetic/preferences", rows: 64}
rewards:
  main:
    terms:
    - judge: {model: grader, scale: [0, 9], criteria: {right: "right?", short: "short?"}}
    - judge: {name: rival, model: sft, against: answer}
stages:
  sft: {kind: sft, init: model, data: demos}
  reward: {kind: reward_model, init: sft, data: pairs}
  policy: {kind: policy_optimization, algorithm: {preset: grpo, samples_per_prompt: 4}, init: model, reward: main, prompts: prompts,
           iterations: 5, batch_size: 32, minibatch_size: 16, validate_every: 2, validation_samples: 16, learning_rate: 1e-4,
           resources: {offload: [reward]}}
"""


@pytest.fixture
def plain() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(TEXT)
    return found


def loaded(plain: dict[str, Any]) -> Any:
    return parse_recipe(yaml.safe_dump(plain, sort_keys=False), name="x.yaml")


def test_a_stage_and_another_model_may_judge(plain: dict[str, Any]) -> None:
    recipe = loaded(plain)
    inputs = dependencies(recipe)
    assert inputs["policy"]["reward.main.0"] == "models.grader"
    assert inputs["policy"]["reward.main.1"] == "sft"
    assert reward_imports(recipe) == frozenset(), "it is imported as a policy"
    plain["models"]["grader"] = {"source": "models:/x@y", "otherwise": "sft"}
    recipe = loaded(plain)
    absent = recipe.models["grader"].model_copy(update={"source": "models:/x@y#none"})
    inputs = dependencies(recipe.model_copy(update={"models": {"grader": absent}}))
    assert inputs["policy"]["reward.main.0"] == "sft"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            "model",
            "policy",
            "stages wait for one another: policy reads policy (rewards.main.terms.0.judge.model)",
        ),
        ("model", "reward", "'reward' is a reward_model stage"),
        (
            "model",
            "critic-7b",
            "rewards.main.terms.0.judge.model: the judge has no url, so its model is one of the run, and no stage is called",
        ),
        (
            "grader",
            {"source": "models:/x@y", "otherwise": "policy"},
            "policy reads policy (models.grader.otherwise)",
        ),
    ],
)
def test_wrong_names_are_refused(plain: dict[str, Any], place: str, value: Any, message: str) -> None:
    if place == "model":
        plain["rewards"]["main"]["terms"][0]["judge"]["model"] = value
        del plain["models"]
    else:
        plain["models"][place] = value
    with pytest.raises(RecipeError) as refused:
        loaded(plain)
    assert message in str(refused.value)


def test_a_model_is_imported_as_one_kind(plain: dict[str, Any]) -> None:
    plain["models"]["grader"] = {"source": "hub:org/name@" + "0" * 40}
    plain["rewards"]["main"]["terms"].append({"model": "grader"})
    with pytest.raises(RecipeError) as refused:
        loaded(plain)
    assert "models.grader: rewards.main.terms.0.judge reads it as a policy, and a reward reads it as" in str(
        refused.value
    )


def test_an_estimate_counts_the_networks_and_their_passes(plain: dict[str, Any]) -> None:
    """The judges score 5 rollouts of 32, 4 validations of 16 and a test of 16, by two criteria or in two orders."""
    found = estimate_recipe(loaded(plain), gpu="h100")
    [stage] = [each for each in found.stages if each.name == "policy"]
    networks = {each.role: each for each in stage.workload.networks}
    assert {"reward.main.0", "reward.main.1"} <= networks.keys()
    assert all(networks[f"reward.main.{i}"].is_offloaded for i in range(2))
    assert not networks["reward.main.0"].is_scalar and not networks["policy"].is_offloaded
    for role, answers in (("reward.main.0", 10), ("reward.main.1", 2)):
        passes = [each for each in stage.workload.passes if each.role == role]
        assert sum(each.times * each.sequences.count for each in passes) == 2 * (5 * 32 + 4 * 16 + 16)
        assert {each.sequences.logit_tokens for each in passes} == {answers}
        assert all(each.sequences.at_once * answers <= 64 for each in passes)
    assert stage.workload.asked == ()


def test_a_watch_asks_about_the_validations_alone(plain: dict[str, Any]) -> None:
    """The watch asks about 4 validations of 16 responses, each in one question with 5 answers."""
    plain["rewards"]["second"] = {"terms": [{"judge": {"model": "sft"}}]}
    plain["stages"]["policy"]["watch"] = {"judge": {"reward": "second"}}
    recipe = loaded(plain)
    assert dependencies(recipe)["policy"]["reward.second.0"] == "sft"
    found = estimate_recipe(recipe, gpu="h100")
    [stage] = [each for each in found.stages if each.name == "policy"]
    passes = [each for each in stage.workload.passes if each.role == "reward.second.0"]
    assert [(each.times, each.sequences.count, each.sequences.logit_tokens) for each in passes] == [
        (4, 16, 5)
    ]
