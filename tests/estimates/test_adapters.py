"""An estimate counts adapters as peft does, and what a stage holds beside its one base."""

from dataclasses import replace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.estimates.test_recipe_estimate import EVERY_KIND, stage
from tests.models.test_adapters import FAMILIES, SMALL
from vantage.estimates.adapters import adapter_weights, with_adapters
from vantage.estimates.layouts import (
    Layout,
    memory_of,
    smallest_layout,
    with_microbatch,
    with_sampled_rows,
)
from vantage.estimates.model_shape import model_shape
from vantage.estimates.recipe_estimate import RecipeEstimate, estimate_recipe
from vantage.estimates.workload import Network, Workload
from vantage.models.adapters import Adaptation, add_adapters, kept_tensors
from vantage.models.model_config import ModelConfig, read_config
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.lora import Lora

RANK_8 = "recipe: every_kind\nmodel: {source: 'builtin:tiny', lora: {rank: 8, alpha: 16}}"
ADAPTER = 8 * 4 * (4 * 2 * 128 + 3 * (128 + 256))
"""Weights of adapters of the tiny model: rank 8, 4 layers, 4 matrices of 128 × 128 and 3 of 128 × 256."""
WHOLE = 669_312


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "mistral", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("targets", ["all_linear", ("q_proj", "down_proj")])
def test_adapters_have_as_many_weights_as_peft_gives_them(family: str, targets: object) -> None:
    if family.startswith("gpt") and targets != "all_linear":
        targets = "all_linear"
    lora = Lora.model_validate({"rank": 4, "targets": targets})
    config = AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config)
    add_adapters(model, Adaptation(lora, seed=1))
    shape = model_shape(ModelConfig(config.to_dict(), None, None))
    assert adapter_weights(shape, lora) == sum(each.numel() for each in kept_tensors(model).values())


@pytest.fixture(scope="module")
def adapted() -> RecipeEstimate:
    text = EVERY_KIND.replace('recipe: every_kind\nmodel: {source: "builtin:tiny"}', RANK_8)
    return estimate_recipe(parse_recipe(text), gpu="h100")


@pytest.fixture(scope="module")
def full() -> RecipeEstimate:
    return estimate_recipe(parse_recipe(EVERY_KIND), gpu="h100")


def test_four_networks_hold_one_base_and_gradients_of_the_adapters_alone(
    adapted: RecipeEstimate, full: RecipeEstimate
) -> None:
    memory = stage(adapted, "policy").memory
    heads = 2 * 128  # the scalar heads of the critic and the reward model
    assert memory.weights == 4 * (WHOLE + 4 * ADAPTER + heads)
    assert memory.gradients == 4 * (2 * ADAPTER + 128)
    assert memory.optimizer == 8 * (2 * ADAPTER + 128)
    assert stage(full, "policy").memory.weights == 4 * (4 * WHOLE + heads)
    sft = stage(adapted, "sft").memory
    assert (sft.weights, sft.gradients) == (4 * (WHOLE + ADAPTER), 4 * ADAPTER)
    evaluation = stage(adapted, "evaluation").memory
    assert evaluation.weights == 4 * (WHOLE + 2 * ADAPTER + 128)


def test_a_base_is_held_once_in_each_precision() -> None:
    """Policy and critic train in float32, reference and reward are read in bfloat16, so the four share two bases."""
    text = EVERY_KIND.replace('recipe: every_kind\nmodel: {source: "builtin:tiny"}', RANK_8)
    recipe, shape = parse_recipe(text), model_shape(read_config("builtin:tiny"))
    networks = [
        Network(role="policy", shape=shape, is_trained=True),
        Network(role="sft", shape=shape, is_bfloat16=True),
        Network(role="value", shape=shape, is_scalar=True, is_trained=True),
        Network(role="reward", shape=shape, is_scalar=True, is_bfloat16=True),
    ]
    found = with_adapters(recipe, "policy", networks)
    assert [each.shares_base for each in found] == [False, False, True, True]
    assert [each.adapter_weights for each in found] == [ADAPTER, ADAPTER, ADAPTER + 128, ADAPTER + 128]


def test_a_base_is_in_4_bits_if_every_stage_trains_adapters() -> None:
    text = EVERY_KIND.replace(
        'recipe: every_kind\nmodel: {source: "builtin:tiny"}', RANK_8.replace("}}", "}, quantization: nf4}")
    )
    recipe, shape = parse_recipe(text), model_shape(read_config("builtin:tiny"))
    networks = [Network(role="policy", shape=shape, is_trained=True)]
    [network] = with_adapters(recipe, "policy", networks)
    assert network.is_in_4_bits
    plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantization": None})})
    [network] = with_adapters(plain, "policy", networks)
    assert not network.is_in_4_bits
    whole = recipe.stages["reward"].model_copy(update={"lora": None})
    [network] = with_adapters(
        recipe.model_copy(update={"stages": {**recipe.stages, "reward": whole}}), "policy", networks
    )
    assert not network.is_in_4_bits


def test_no_gradient_of_frozen_weights_is_computed(adapted: RecipeEstimate, full: RecipeEstimate) -> None:
    ratio = stage(adapted, "sft").flops / stage(full, "sft").flops
    assert 2 / 3 < ratio < 1, "two thirds of the layers', and adapters that are a fifth of so small a model"


def test_checkpointed_gradients_keep_the_inputs_of_layers_alone(full: RecipeEstimate) -> None:
    text = EVERY_KIND.replace("kind: sft, data", "kind: sft, gradient_checkpointing: true, data")
    sft = stage(estimate_recipe(parse_recipe(text), gpu="h100"), "sft")
    plain = stage(full, "sft")
    assert sft.memory.activations < 0.7 * plain.memory.activations
    assert 1.2 < sft.flops / plain.flops < 1.34
    assert memory_of(sft.workload, Layout(1), full.device) == sft.memory


def test_moments_in_8_bits_take_a_quarter_and_are_not_cut(full: RecipeEstimate) -> None:
    text = EVERY_KIND.replace(
        "kind: policy_optimization, algorithm: vapo,",
        "kind: policy_optimization, algorithm: vapo, optimizer_states: 8bit,",
    )
    rounded, plain = stage(estimate_recipe(parse_recipe(text), gpu="h100"), "policy"), stage(full, "policy")
    weights = sum(each.weights for each in plain.workload.networks if each.is_trained)
    assert plain.memory.optimizer == 8 * weights
    assert rounded.memory.optimizer == pytest.approx((2 + 8 / 256) * weights, abs=1)
    assert plain.memory.peak - rounded.memory.peak == pytest.approx((6 - 8 / 256) * weights, abs=1)
    one_row = with_sampled_rows(with_microbatch(rounded.workload, 1), 1)
    small = replace(full.device, memory=memory_of(one_row, Layout(1), full.device).peak)
    assert smallest_layout(rounded.workload, small) is None
    cut = smallest_layout(replace(rounded.workload, has_8_bit_states=False), small)
    assert cut is not None and cut[0].is_sharded


def test_an_offloaded_network_is_there_for_its_passes_alone(full: RecipeEstimate) -> None:
    """The reference and the reward model leave what they take while responses are sampled and the policy learns."""
    text = EVERY_KIND.replace(
        "algorithm: vapo,", "algorithm: vapo, resources: {offload: [reference, reward]},"
    )
    away, plain = stage(estimate_recipe(parse_recipe(text), gpu="h100"), "policy"), stage(full, "policy")
    [reference] = [each for each in plain.workload.networks if each.role == "reference"]
    [reward] = [each for each in plain.workload.networks if each.role == "reward"]
    assert plain.memory.weights - away.memory.weights == 4 * (reference.weights + reward.weights)

    def peak(of: Workload, does: str, role: str) -> float:
        passes = tuple(each for each in of.passes if (each.does, each.role) == (does, role))
        assert passes
        return memory_of(replace(of, samplings=(), passes=passes), Layout(1), full.device).peak

    def saved(does: str, role: str) -> float:
        return peak(plain.workload, does, role) - peak(away.workload, does, role)

    assert saved("train", "policy") == pytest.approx(4 * (reference.weights + reward.weights), abs=1)
    assert saved("score", "reference") == pytest.approx(4 * reward.weights, abs=1), "it is there itself"
    assert saved("score", "reward") == pytest.approx(4 * reference.weights, abs=1)


def test_moments_in_host_memory_take_none_of_a_gpu(full: RecipeEstimate) -> None:
    text = EVERY_KIND.replace("{kind: sft,", "{kind: sft, resources: {offload: [optimizer]},")
    away, plain = stage(estimate_recipe(parse_recipe(text), gpu="h100"), "sft"), stage(full, "sft")
    assert (away.memory.optimizer, plain.memory.optimizer) == (0, 8 * plain.workload.networks[0].weights)
    assert plain.memory.peak - away.memory.peak == plain.memory.optimizer
    on_cpu = stage(estimate_recipe(parse_recipe(text), gpu="cpu"), "sft")
    assert on_cpu.memory.optimizer == plain.memory.optimizer, "there is one memory"
