"""Stages inherit a ``rollout`` of the whole recipe, and a wrong one is reported at its place."""

from typing import Any

import pytest

from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.recipe import Recipe, ResolvedRecipe

STAGES = """
recipe: small
model: {{source: "builtin:tiny"}}
{shared}
data:
  texts: {{source: "builtin:arithmetic/demonstrations", rows: 200}}
  prompts: {{source: "builtin:arithmetic/prompts", rows: 200}}
verifiers: {{right: {{source: right.py}}}}
rewards: {{right: {{terms: [{{verifier: right}}]}}}}
stages:
  sft: {{kind: sft, data: texts, learning_rate: 0.001}}
  value: {{kind: value_pretraining, policy: sft, init: sft, prompts: prompts, reward: right, learning_rate: 0.001{value}}}
  policy: {{kind: policy_optimization, init: sft, critic: value, algorithm: {{preset: ppo}}, prompts: prompts, reward: right, learning_rate: 0.001{policy}}}
  collected: {{kind: rollout_collection, policy: sft, prompts: prompts, reward: right{collected}}}
"""


@pytest.fixture(autouse=True)
def verifier(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "right.py").write_text("def verify(prompt, response, answer):\n    return True\n")
    monkeypatch.chdir(tmp_path)


def loaded(shared: str = "", **stages: str) -> Recipe:
    parts = {"value": "", "policy": "", "collected": ""} | stages
    return parse_recipe(STAGES.format(shared=shared and f"rollout: {shared}", **parts))


def same(one: Recipe, other: Recipe) -> bool:
    return ResolvedRecipe.of(one).model_dump_json() == ResolvedRecipe.of(other).model_dump_json()


@pytest.mark.parametrize(
    "shared, own, expected",
    [
        ("{engine: vllm}", None, "{engine: vllm}"),
        ("{engine: vllm, max_rows: 8}", "{max_rows: 4}", "{engine: vllm, max_rows: 4}"),
        ("{engine: vllm, max_rows: 8}", "{engine: loop}", "{engine: loop}"),
        ("{engine: vllm, max_rows: 8}", "{engine: vllm}", "{engine: vllm}"),
        (
            "{engine: vllm, url: 'http://a:1', api_key_variable: KEY, request_seconds: 5}",
            "{servers: 2}",
            "{engine: vllm, servers: 2, request_seconds: 5}",
        ),
        ("{engine: vllm, servers: 2}", "{url: 'http://a:1'}", "{engine: vllm, url: 'http://a:1'}"),
        ("{engine: vllm, servers: 1}", "{ahead: 1}", "{engine: vllm, servers: 1, ahead: 1}"),
        (
            "{engine: vllm, servers: 1, tensor_parallel: 2}",
            "{url: 'http://a:1'}",
            "{engine: vllm, url: 'http://a:1'}",
        ),
        ("{engine: vllm, servers: 1, tensor_parallel: 2}", "{servers: null}", "{engine: vllm}"),
        (
            "{engine: vllm, servers: 1, tensor_parallel: 2}",
            "{servers: 3}",
            "{engine: vllm, servers: 3, tensor_parallel: 2}",
        ),
        (
            "{engine: vllm, servers: 1, tensor_parallel: 2}",
            "{max_rows: 4}",
            "{engine: vllm, servers: 1, tensor_parallel: 2, max_rows: 4}",
        ),
        ("{max_rows: 8}", None, "{max_rows: 8}"),
    ],
)
def test_a_stage_inherits_what_it_does_not_set(shared: str, own: str | None, expected: str) -> None:
    """The recipe is the one in which every stage has its fields written out."""
    found = loaded(shared, policy=f", rollout: {own}" if own else "")
    others = f", rollout: {shared}"
    assert same(found, loaded(value=others, policy=f", rollout: {expected}", collected=others))
    assert found.rollout is None and "rollout" not in ResolvedRecipe.of(found).model_dump()
    again = parse_recipe(ResolvedRecipe.of(found).model_dump_json())
    assert same(again, found)


@pytest.mark.parametrize(
    "shared, own, message",
    [
        ("{engine: fast}", "", "recipe:4: rollout.engine"),
        ("{motor: vllm}", "", "there is no field 'motor' here"),
        ("3", "", "rollout"),
        ("{ahead: 1}", "", "there is no field 'ahead' here"),
        ("{url: 'http://a:1'}", "", "add engine: vllm"),
        (
            "{engine: vllm}",
            ", rollout: {ahead: 1}",
            "engine=vllm in the stage's process samples only between two updates",
        ),
        ("{engine: vllm}", ", resources: {nodes: 2}", "samples in the stage's processes, on one machine"),
        ("{engine: vllm, servers: 2}", ", resources: {gpus: 2}", "none is left to train"),
    ],
)
def test_what_a_stage_cannot_inherit_is_refused(shared: str, own: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        loaded(shared, policy=own)
    lines = str(caught.value).splitlines()
    assert any(message in line for line in lines), lines
    assert len(lines) == len(set(lines)) <= 2


@pytest.mark.parametrize("kind", ["[sft]", "{a: b}", "3", "null", "rewards"])
def test_a_stage_of_no_kind_is_left_to_its_own_check(kind: str) -> None:
    text = STAGES.format(shared="rollout: {engine: vllm}", value="", policy="", collected="")
    with pytest.raises(RecipeError, match="stages.policy.kind"):
        parse_recipe(text.replace("policy_optimization", kind))


def test_a_recipe_made_by_hand_has_it_in_its_stages() -> None:
    found = loaded().model_copy(update={"rollout": loaded("{engine: vllm}").stages["policy"].rollout})  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="rollout belongs to the stages of a loaded recipe"):
        ResolvedRecipe.of(found)
