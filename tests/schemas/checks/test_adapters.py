"""Adapters in a recipe are inherited from the model, refused where they cannot go on, and in the keys of no older recipe."""

from typing import Any

import pytest

from tests.support.every import every
from vantage.attempts.jobs import key_parts_of, work_of
from vantage.runs.resolving import resolve_rates
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.work import MergePolicy, MergeRewardModel
from vantage.schemas.steps import dependencies, ordered_steps

TEXT = """
recipe: small
model: {{source: "builtin:tiny"{model}}}
data:
  demonstrations: {{source: "builtin:arithmetic/demonstrations"}}
  preferences: {{source: "builtin:arithmetic/preferences"}}
  prompts: {{source: "builtin:arithmetic/prompts"}}
rewards: {{main: {{terms: [{{model: reward}}]}}}}
stages:
  sft: {{kind: sft, data: demonstrations{sft}}}
  reward: {{kind: reward_model, init: sft, data: preferences{reward}}}
  value: {{kind: value_pretraining, policy: sft, init: reward, reward: main, prompts: prompts{value}}}
  policy: {{kind: policy_optimization, algorithm: vapo, init: sft, critic: value, reward: main, prompts: prompts{policy}}}
  evaluation: {{kind: evaluation, candidate: policy, baseline: sft, judge: {{verifier: arithmetic}}, prompts: prompts{evaluation}}}
publish:
  - {{stage: policy, registered_model: small{publish}}}
  - {{stage: reward, registered_model: small-reward{publish}}}
"""
NAMES = ("model", "sft", "reward", "value", "policy", "evaluation", "publish")
LORA = ", lora: {rank: 8, alpha: 16}"
NONE = ", lora: false"


def recipe(**parts: str) -> Recipe:
    return parse_recipe(TEXT.format(**{name: parts.get(name, "") for name in NAMES}))


def lora(found: Recipe, name: str) -> Any:
    stage = found.stages[name]
    assert isinstance(stage, Training)
    return stage.lora


def refused(**parts: str) -> str:
    with pytest.raises(RecipeError) as error:
        recipe(**parts)
    return str(error.value)


def test_stages_have_the_adapters_of_the_model_unless_they_say_otherwise() -> None:
    found = recipe(model=LORA, value=NONE, policy=NONE)
    assert lora(found, "sft") == lora(found, "reward") == Lora(rank=8, alpha=16.0)
    assert lora(found, "value") is False and lora(found, "policy") is False
    alone = recipe(sft=LORA)
    assert lora(alone, "sft") == Lora(rank=8, alpha=16.0) and lora(alone, "reward") is None


def test_all_weights_have_the_key_of_a_recipe_without_adapters_and_adapters_another() -> None:
    plain, _ = resolve_rates(recipe())
    without, _ = resolve_rates(recipe(model=LORA, sft=NONE, reward=NONE, value=NONE, policy=NONE))
    adapted, _ = resolve_rates(recipe(model=LORA, sft=", learning_rate: 1.0e-3"))
    digests = dict.fromkeys(("init", "data"), "0" * 64)
    keys = [key_parts_of(each, "sft", digests) for each in (plain, without, adapted)]
    assert keys[0] == keys[1] != keys[2]
    assert "lora" not in keys[0]["configuration"]
    assert keys[2]["configuration"]["lora"] == {"rank": 8, "alpha": 16.0, "targets": "all_linear"}
    assert len({str(key_parts_of(each, "model", {})) for each in (plain, without, adapted)}) == 1
    forgetful, _ = resolve_rates(recipe(sft=", gradient_checkpointing: true"))
    assert key_parts_of(forgetful, "sft", digests) == keys[0], "it changes memory alone"


def test_adapters_learn_ten_times_as_fast() -> None:
    full, lora_run = (resolve_rates(each)[0] for each in (recipe(), recipe(model=LORA, policy=NONE)))
    for name, factor in (("sft", 10.0), ("reward", 10.0), ("value", 10.0), ("policy", 1.0)):
        rates = [each.stages[name].learning_rate for each in (full, lora_run)]  # type: ignore[attr-defined]
        assert rates[1] == pytest.approx(factor * rates[0], rel=0.05)
    both = [
        resolve_rates(each)[0].stages["policy"].critic_learning_rate  # type: ignore[attr-defined]
        for each in (recipe(), recipe(model=LORA))
    ]
    assert both[1] == pytest.approx(10 * both[0], rel=0.05)


def test_adapters_of_another_shape_cannot_go_on() -> None:
    text = refused(model=LORA, policy=", lora: {rank: 4, alpha: 16}")
    assert "stages.policy.lora" in text
    assert "rank=4 alpha=16 targets=all_linear cannot go on from init=sft, which has lora of rank=8" in text
    assert "from critic=value" in text and "give both the same lora, or set stages.value.lora: false" in text
    assert recipe(model=LORA, sft=NONE, policy=", lora: {rank: 8, alpha: 16}")
    assert recipe(sft=NONE, reward=LORA)


def test_an_optimiser_goes_on_with_the_weights_that_it_has_moved() -> None:
    """With adapters on one side alone, the carried optimiser would have moments of the value head only."""
    carry = ", critic_optimizer: carry"
    text = refused(model=LORA, value=NONE, policy=carry)
    assert (
        "stages.policy.critic_optimizer: carry goes on with the optimiser of 'value', which trains all weights, and this "
        "stage trains lora of rank=8 alpha=16 targets=all_linear; give policy and value the same lora, or set "
        "critic_optimizer: fresh"
    ) in " ".join(text.split())
    text = refused(model=LORA, policy=NONE + carry)
    assert "which trains lora of rank=8" in text and "this stage trains all weights" in text
    assert recipe(model=LORA, policy=carry)
    assert recipe(policy=carry)
    assert recipe(model=LORA, value=NONE)


FSDP2 = ", resources: {distributed: {strategy: fsdp2, ranks: 2}}"


def test_adapters_and_what_reads_them_may_be_cut() -> None:
    assert recipe(sft=LORA + FSDP2)
    assert recipe(model=LORA, policy=NONE + FSDP2)
    assert recipe(policy=LORA, evaluation=FSDP2)


def test_adapters_on_a_base_in_4_bits_and_what_reads_them_are_not_cut() -> None:
    quantised = f"{LORA}, quantization: nf4"
    text = " ".join(refused(model=quantised, sft=FSDP2).split())
    assert (
        "stages.sft.resources.distributed.strategy: fsdp2 cuts weights by rows, and those of a base in 4 bits (nf4)"
        in text
    )
    assert "use strategy: ddp, or leave model.quantization out" in text
    assert refused(model=quantised, policy=NONE + FSDP2)
    assert refused(model=quantised, evaluation=FSDP2)
    assert recipe(model=quantised)


@every(
    ("given", "message"),
    [
        ("{rank: 0}", "stages.sft.lora.rank: 0 must be at least 1"),
        ("{rank: 8.5}", "stages.sft.lora.rank: 8.5 must be a whole number"),
        ("{alpha: 0}", "stages.sft.lora.alpha: 0 must be above 0"),
        ("{targets: []}", "stages.sft.lora.targets"),
        ("{targets: ['a b']}", "stages.sft.lora.targets.0"),
        ("{dropout: 0.1}", "stages.sft.lora.dropout"),
        ("true", "stages.sft.lora: true"),
    ],
)
def test_wrong_values_are_refused(given: str, message: str) -> None:
    assert message in refused(sft=f", lora: {given}")


def test_published_adapters_are_merged_unless_the_recipe_says_otherwise() -> None:
    found, _ = resolve_rates(recipe(model=LORA))
    read = dependencies(found)
    assert read["merged.policy"] == {"adapters": "policy"} and read["merged.reward"] == {"adapters": "reward"}
    assert work_of(found, "merged.policy") == MergePolicy(adapters="policy")
    assert work_of(found, "merged.reward") == MergeRewardModel(adapters="reward")
    order = ordered_steps(found)
    assert order.index("policy") < order.index("merged.policy")
    for other in (recipe(), recipe(model=LORA, publish=", merge: false"), recipe(sft=LORA)):
        assert not any(step.startswith("merged.") for step in dependencies(other))
