"""Adapters equal hand-worked values and peft's, share the weights of one base, and are refused where they do not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vantage.models.adapter_check import CONFIG, WEIGHTS, UnsafeModel, check_adapter
from vantage.models.adapters import (
    Adaptation,
    add_adapters,
    base_of,
    change_nothing,
    kept_tensors,
    write_adapters,
)
from vantage.models.folders import load_policy, save_policy, save_tokenizer
from vantage.models.gradient_checkpointing import checkpoint_gradients
from vantage.models.heads import (
    load_critic,
    load_scalar,
    reward_with_language_head,
    save_reward,
    save_value,
    values,
)
from vantage.models.merging import merge
from vantage.models.sequences import collate
from vantage.models.stored_models import load_stored_policy
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.records.model_files import ModelFiles

CPU = torch.device("cpu")
LORA = Lora(rank=4, alpha=8.0)
TRAINING = Adaptation(LORA, seed=3)
IDS = torch.tensor([[1, 40, 9, 77, 20, 5], [1, 7, 8, 9, 10, 11]])
DIGEST = "ab" * 32

SMALL = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48},
    "gpt_neox": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "phi": {},
}


def small(family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, **changes: object) -> Path:
    """Return a random model of a family, as a folder."""
    config: PreTrainedConfig = AutoConfig.for_model(family, **(SMALL | FAMILIES[family] | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms too, which begin alike
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    save_policy(model, tokenizer, tmp_path / family)
    return tmp_path / family


def trained(folder: Path, *, steps: int = 3) -> PreTrainedModel:
    """Return a model with adapters that have learned something."""
    model = load_stored_policy(ModelFiles(folder), training=TRAINING)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(steps):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


@pytest.fixture
def adapter(tiny: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """Return adapters on the tiny model that have learned something."""
    write_adapters(trained(tiny), tmp_path / "adapter", base=DIGEST)
    save_tokenizer(tiny_tokenizer, tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_begins_at_its_base_and_comes_back_by_peft_and_merged(
    family: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = small(family, tmp_path, tiny_tokenizer)
    expected = logits(load_policy(folder))
    fresh = load_stored_policy(ModelFiles(folder), training=TRAINING)
    assert torch.equal(logits(fresh), expected), "B = 0: bitwise the base"
    assert change_nothing(fresh)

    model = trained(folder)
    moved = logits(model)
    assert not torch.allclose(moved, expected, atol=1e-3) and not change_nothing(model)
    write_adapters(model, tmp_path / "adapter", base=DIGEST)
    save_tokenizer(tiny_tokenizer, tmp_path / "adapter")
    files = ModelFiles(tmp_path / "adapter", folder)
    assert torch.equal(logits(load_stored_policy(files, training="nothing")), moved)
    by_peft = PeftModel.from_pretrained(load_policy(folder), str(tmp_path / "adapter"))  # type: ignore[arg-type]
    assert torch.equal(logits(by_peft), moved)
    merge(files, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), moved, atol=2e-5)
    assert not (tmp_path / "merged" / CONFIG).exists()
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "merged" / file).read_bytes() == (folder / file).read_bytes()


def test_merged_weights_are_those_worked_out_by_hand(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    merge(ModelFiles(adapter, tiny), tmp_path / "merged")
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", tiny))
    parts = load_file(adapter / WEIGHTS)
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert len(parts) == 2 * 4 * 7 and len(changed) == 4 * 7
    for name in changed:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = parts[f"{stem}.lora_A.weight"].double(), parts[f"{stem}.lora_B.weight"].double()
        expected = base[name].double() + 8 / 4 * b @ a
        torch.testing.assert_close(merged[name].double(), expected, atol=1e-6, rtol=0)
    assert merged.keys() == base.keys(), "the tied head is stored once, as before"


def test_one_step_of_sgd_is_that_of_the_two_factors_by_hand(tiny: Path) -> None:
    """For loss = Σ C·y with y = (W + 2·B·A)·x the gradients, summed over tokens, are dB = 2·C·xᵀ·Aᵀ and
    dA = 2·Bᵀ·C·xᵀ, which is 0 while B is 0."""
    model = load_stored_policy(ModelFiles(tiny), training=TRAINING).double()
    layer = model.model.layers[0].mlp.up_proj
    x, c = torch.randn(5, 128, dtype=torch.float64), torch.randn(5, 256, dtype=torch.float64)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    (c * layer(x)).sum().backward()
    torch.testing.assert_close(b.grad, 2 * (c.T @ x) @ a.detach().T)
    assert not a.grad.any()
    with torch.no_grad():
        b -= 0.1 * b.grad
    expected = x @ (layer.base_layer.weight + 2 * b @ a).T
    torch.testing.assert_close(layer(x), expected)


def test_fresh_factors_are_made_by_their_seed_alone(tiny: Path) -> None:
    before = torch.get_rng_state()
    one, same, other = (
        kept_tensors(load_stored_policy(ModelFiles(tiny), training=Adaptation(LORA, seed=seed)))
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    a = [name for name in one if ".lora_A." in name]
    assert all(torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name]) for name in a)
    assert all(one[name].abs().max() <= one[name].shape[1] ** -0.5 for name in a)
    assert one.keys() == set(a) | {name.replace("lora_A", "lora_B") for name in a}, "and nothing else is kept"


def storages(*models: nn.Module) -> int:
    """Return bytes of the distinct storages of all parameters."""
    found = {each.untyped_storage().data_ptr(): each for model in models for each in model.parameters()}
    return sum(each.untyped_storage().nbytes() for each in found.values())


def test_four_networks_on_one_base_hold_its_weights_once(
    tiny: Path, adapter: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    files = ModelFiles(adapter, tiny)
    reward = reward_with_language_head(files, seed=1, device=CPU, training=TRAINING)
    save_reward(reward, tiny_tokenizer, tmp_path / "reward", score_shift=0.5, base=DIGEST)
    value = load_critic(ModelFiles(tmp_path / "reward", tiny), seed=1, training=TRAINING)
    save_value(value, tiny_tokenizer, tmp_path / "value", base=DIGEST)
    del reward, value

    policy = load_stored_policy(files, training=TRAINING)
    networks = [
        policy,
        load_stored_policy(files, training="nothing"),
        load_critic(ModelFiles(tmp_path / "value", tiny), seed=1, training=TRAINING),
        load_scalar(ModelFiles(tmp_path / "reward", tiny), role="reward", training="nothing"),
    ]
    adapters = sum(each.nbytes for each in kept_tensors(policy).values())
    heads = 4 * (128 + 1) + 4 * 128
    assert storages(*networks) == storages(load_policy(tiny)) + 4 * adapters + heads
    assert storages(*networks, load_stored_policy(ModelFiles(tiny), training="nothing")) == storages(
        *networks
    )
    # each network computes by itself: a step of one changes no other
    before = [kept_tensors(each) for each in networks[1:]]
    policy(IDS, labels=IDS).loss.backward()
    torch.optim.SGD([each for each in policy.parameters() if each.requires_grad], lr=1.0).step()
    for network, was in zip(networks[1:], before, strict=True):
        assert all(torch.equal(was[name], each) for name, each in kept_tensors(network).items())


def test_the_weights_beneath_are_as_they_were_after_training(tiny: Path) -> None:
    model = trained(tiny)
    stored = load_file(tiny / "model.safetensors")
    now = {name.replace(".base_layer", ""): each for name, each in model.state_dict().items()}
    assert all(torch.equal(now[name], each) for name, each in stored.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight, "the head is still tied"
    assert model.get_output_embeddings() is model.lm_head


def test_a_network_that_is_gone_leaves_nothing_to_share(tiny: Path) -> None:
    first = load_stored_policy(ModelFiles(tiny), training="nothing")
    pointer = first.model.norm.weight.data_ptr()
    # a shared weight must not be changed in place; here this shows which networks share it
    with torch.no_grad():
        first.model.norm.weight.fill_(7.0)
    second = load_stored_policy(ModelFiles(tiny), training="nothing")
    assert second.model.norm.weight.data_ptr() == pointer
    del first, second
    third = load_stored_policy(ModelFiles(tiny), training="nothing")
    assert (third.model.norm.weight == 1.0).all()


def test_reward_and_value_models_come_back_and_score_as_they_did(
    tiny: Path, adapter: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    files = ModelFiles(adapter, tiny)
    critic = load_critic(files, seed=1, training=TRAINING)
    batch = collate([[1, 5, 6], [1, 7]], [[9, 10], [11, 12, 2]], pad_token_id=0)
    expected = values(critic, batch)
    expected.sum().backward()
    save_value(critic, tiny_tokenizer, tmp_path / "value", base=DIGEST)
    names = {path.name for path in (tmp_path / "value").iterdir()}
    assert {CONFIG, WEIGHTS, "base.json", "head.safetensors", "scalar.json"} <= names
    assert not names & {"model.safetensors", "config.json"} and base_of(tmp_path / "value") == DIGEST
    again = load_scalar(ModelFiles(tmp_path / "value", tiny), role="value", training="nothing")
    assert torch.equal(values(again, batch), expected)
    # all weights are trained from here: merged on loading, with every weight its own
    whole = load_critic(ModelFiles(tmp_path / "value", tiny), seed=1)
    torch.testing.assert_close(values(whole, batch), expected, atol=1e-5, rtol=0)
    assert all(each.requires_grad for each in whole.parameters())
    assert not any(".lora_" in name for name, _ in whole.named_parameters())
    save_value(whole, tiny_tokenizer, tmp_path / "whole")
    on_it = load_critic(ModelFiles(tmp_path / "whole"), seed=1, training=TRAINING)
    torch.testing.assert_close(values(on_it, batch), values(whole, batch), atol=0, rtol=0)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("training", ["all", TRAINING], ids=["all weights", "adapters"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "bloom"])
def test_checkpointed_gradients_are_bitwise_the_same_and_less_is_kept(
    family: str, training: Adaptation, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = small(family, tmp_path, tiny_tokenizer)
    plain = load_stored_policy(ModelFiles(folder), training=training)
    expected, kept = counting(lambda: gradients(plain))
    model = load_stored_policy(ModelFiles(folder), training=training)
    checkpoint_gradients(model)
    found, kept_now = counting(lambda: gradients(model))
    assert found.keys() == expected.keys() and len(found) > 4
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept_now < 0.6 * kept
    sampled = [each.generate(IDS, max_new_tokens=4, do_sample=False) for each in (plain, model)]
    assert torch.equal(*sampled), "and its cache is that of any other"


def counting(run: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], int]:
    """Return the result of ``run``, and the bytes that its forward passes keep for the backward passes."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return run(), kept


# -- what is refused


def edited(folder: Path, **changes: object) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3', must be LORA"),
        ({"use_dora": True}, "use_dora='True'"),
        ({"use_rslora": True}, "use_rslora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": 8}, "r=8; the two disagree"),
        ({"r": True}, "r=True is no whole number"),
        ({"r": "4"}, "r=4 is no whole number"),
        ({"lora_alpha": -1}, "lora_alpha=-1 is not above 0"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "asks for code of its own"),
    ],
)
def test_what_is_no_plain_adapter_is_refused_by_field_and_rule(
    adapter: Path, tiny: Path, changes: dict[str, object], message: str
) -> None:
    edited(adapter, **changes)
    with pytest.raises(UnsafeModel, match=message):
        load_stored_policy(ModelFiles(adapter, tiny), training="nothing")


def test_the_name_of_a_base_is_never_followed(adapter: Path, tiny: Path) -> None:
    edited(adapter, base_model_name_or_path="/etc/passwd", revision="../..")
    expected = logits(load_stored_policy(ModelFiles(adapter, tiny), training="nothing"))
    edited(adapter, base_model_name_or_path=None)
    assert torch.equal(logits(load_stored_policy(ModelFiles(adapter, tiny), training="nothing")), expected)
    with pytest.raises(UnsafeModel, match="holds adapters alone; give the model that they belong to"):
        load_stored_policy(ModelFiles(adapter), training="nothing")


def test_weights_that_do_not_fit_are_refused(
    adapter: Path, tiny: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    stored = load_file(adapter / WEIGHTS)
    other = small("gpt2", tmp_path, tiny_tokenizer)
    with pytest.raises(UnsafeModel, match="which is no linear layer of the base; use the base"):
        load_stored_policy(ModelFiles(adapter, other), training="nothing")
    narrow = small("llama", tmp_path, tiny_tokenizer, num_hidden_layers=4)
    with pytest.raises(UnsafeModel, match="has the shape .*, the base needs"):
        load_stored_policy(ModelFiles(adapter, narrow), training="nothing")
    name = next(iter(stored))
    for wrong, message in (
        ({name: stored[name]}, "has only one of lora_A and lora_B"),
        (stored | {"base_model.model.lm_head.weight": torch.zeros(1)}, "is none of base_model.model.LAYER"),
        ({}, "there are no adapters in it"),
    ):
        save_file(wrong, adapter / WEIGHTS)
        with pytest.raises(UnsafeModel, match=message):
            check_adapter(adapter)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(UnsafeModel, match="is missing; save the adapter as safetensors"):
        check_adapter(adapter)
    shutil.copy(tiny / "model.safetensors", adapter / "adapter_model.bin")
    with pytest.raises(UnsafeModel, match="is a pickle by its suffix"):
        load_stored_policy(ModelFiles(adapter, tiny), training="nothing")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            Lora(rank=8, alpha=8.0),
            r"lora.rank=8 cannot go on from adapters with rank=4 .*; use the same, or lora: false",
        ),
        (Lora(rank=4, alpha=4.0), "lora.alpha=4.0 cannot go on from adapters with alpha=8"),
        (Lora(rank=4, alpha=8.0, targets=("q_proj",)), r"lora.targets=\('q_proj',\) cannot go on"),
    ],
)
def test_adapters_of_another_shape_are_not_gone_on_with(
    adapter: Path, tiny: Path, lora: Lora, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_stored_policy(ModelFiles(adapter, tiny), training=Adaptation(lora, seed=1))


def test_targets_are_linear_layers_other_than_the_output_head(tiny_policy: PreTrainedModel) -> None:
    for wrong in ("lm_head", "embed_tokens", "q"):
        with pytest.raises(
            ValueError, match=rf"lora.targets: '{wrong}' is no linear layer of LlamaForCausalLM"
        ):
            add_adapters(tiny_policy, Adaptation(Lora(targets=(wrong,)), seed=1))
    add_adapters(tiny_policy, Adaptation(Lora(targets=("q_proj", "v_proj")), seed=1))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in kept_tensors(tiny_policy)}
    assert layers == {"q_proj", "v_proj"}
