"""Weights in 4 bits are rounded as the paper says, and compute the same bits as when they are held in float32."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from transformers import PreTrainedTokenizerBase

from tests.models.test_adapters import IDS, TRAINING, small, storages
from vantage.models.adapters import kept_tensors, write_adapters
from vantage.models.folders import load_policy
from vantage.models.merging import merge
from vantage.models.quantisation import SIDECAR, load_frozen, quantised_layers, round_folder
from vantage.models.stored_models import load_stored_policy
from vantage.schemas.records.model_files import ModelFiles

FAMILIES = ["llama", "qwen2", "qwen3", "gemma", "mistral", "gpt_neox", "bloom", "phi"]


@pytest.fixture
def plain(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Return a random Llama."""
    return small("llama", tmp_path, tiny_tokenizer)


def grid() -> np.ndarray:
    """Return NF4's 16 values as QLoRA's paper has them (eq. 4, appendix E): quantiles of N(0, 1), 7 below 0, 0, and 8
    above.
    """
    offset = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2  # the mean of the outermost ones for 15 and 16 values
    above, below = norm.ppf(np.linspace(offset, 0.5, 9)[:-1]), -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([above, [0.0], below]))
    return np.asarray(values / values.max())


def rounded_by_hand(weight: np.ndarray) -> np.ndarray:
    """Return weights of which each block of 64 in a row was divided by its largest absolute value, and moved to the
    nearest value of the grid.
    """
    found = np.empty(weight.size)
    flat = weight.astype(np.float64).ravel()
    for start in range(0, flat.size, 64):
        block = flat[start : start + 64]
        scale = np.abs(block).max()
        nearest = np.abs(block[:, None] / scale - grid()[None]).argmin(axis=1)
        found[start : start + 64] = grid()[nearest] * scale
    return found.reshape(weight.shape)


def test_weights_are_rounded_as_the_paper_says(plain: Path, tmp_path: Path) -> None:
    round_folder(plain, tmp_path / "rounded")
    before, after = load_policy(plain).state_dict(), load_policy(tmp_path / "rounded").state_dict()
    layers = quantised_layers(tmp_path / "rounded")
    assert len(layers) == 14, "7 matrices in each of two layers, and not the head"
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {f"{name}.weight" for name in layers}
    for name in moved:
        by_hand = rounded_by_hand(before[name].numpy())
        assert np.abs(after[name].numpy() - by_hand).max() < 1e-6
        assert np.abs(by_hand - before[name].numpy()).max() > 1e-3


def test_rounding_twice_is_rounding_once(plain: Path, tmp_path: Path) -> None:
    round_folder(plain, tmp_path / "once")
    round_folder(tmp_path / "once", tmp_path / "twice")
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "twice" / path.name).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_in_4_bits_passes_and_gradients_have_the_same_bits(
    family: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    rounded, in_float = tmp_path / "rounded", tmp_path / "in_float"
    round_folder(small(family, tmp_path, tiny_tokenizer), rounded)
    shutil.copytree(rounded, in_float)
    (in_float / SIDECAR).unlink()
    found = []
    for folder in (rounded, in_float):
        model = load_stored_policy(ModelFiles(folder), training=TRAINING)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.manual_seed(len(name))
                parameter.data.normal_(std=0.1)
        model(IDS, labels=IDS).loss.backward()
        gradients = [each.grad for each in model.parameters() if each.requires_grad]
        found.append(
            (model(IDS).logits, gradients, {name: each.shape for name, each in kept_tensors(model).items()})
        )
        narrow = [each for each in model.modules() if type(each).__name__ == "FrozenLinear"]
        assert len(narrow) == (len(quantised_layers(rounded)) if folder is rounded else 0)
    assert torch.equal(found[0][0], found[1][0])
    assert all(g is not None and g.any() for g in found[0][1][1::2]), "of every B"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0][1], found[1][1], strict=True))
    assert found[0][2] == found[1][2], "checkpoints hold the adapters, and no scale"


@pytest.mark.slow
def test_networks_on_one_base_share_what_is_in_4_bits(plain: Path, tmp_path: Path) -> None:
    round_folder(plain, tmp_path / "rounded")
    files = ModelFiles(tmp_path / "rounded")
    policy, reference = (
        load_stored_policy(files, training=TRAINING),
        load_stored_policy(files, training="nothing"),
    )
    assert torch.equal(policy(IDS).logits, reference(IDS).logits), "adapters that are off"
    mine = {id(each) for each in policy.parameters()}
    assert all(id(each) in mine for each in reference.parameters())
    matrices = [load_policy(plain).get_parameter(f"{name}.weight") for name in quantised_layers(files.folder)]
    in_float = sum(each.nbytes for each in matrices)
    assert storages(load_policy(plain)) - storages(reference) == pytest.approx(in_float * 7 / 8, rel=1e-6)


def test_what_is_merged_is_what_was_trained(plain: Path, tmp_path: Path) -> None:
    rounded, adapters, whole = (tmp_path / name for name in ("rounded", "adapters", "whole"))
    round_folder(plain, rounded)
    model = load_stored_policy(ModelFiles(rounded), training=TRAINING)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    write_adapters(model, adapters, base=None)
    merge(ModelFiles(adapters, rounded), whole)
    assert quantised_layers(whole) == ()
    assert torch.allclose(load_policy(whole)(IDS).logits, model(IDS).logits, atol=1e-4)
    assert not torch.allclose(load_policy(rounded)(IDS).logits, model(IDS).logits, atol=1e-2)


def test_autocast_multiplies_in_the_narrower_type(plain: Path, tmp_path: Path) -> None:
    round_folder(plain, tmp_path / "rounded")
    model, twin = load_frozen(tmp_path / "rounded", dtype=torch.float32), load_policy(tmp_path / "rounded")
    layer = next(name for name in quantised_layers(tmp_path / "rounded"))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = model.get_submodule(layer)(x), twin.get_submodule(layer)(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02)


def test_a_model_without_linear_layers_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no linear layers.*leave quantization out"):
        round_folder(small("gpt2", tmp_path, tiny_tokenizer), tmp_path / "rounded")


def test_without_bitsandbytes_the_package_is_named(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"vantage-rlhf\[qlora\]"):
        round_folder(plain, tmp_path / "rounded")


def test_a_plain_folder_is_held_as_it_is(plain: Path) -> None:
    model = load_frozen(plain, dtype=torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert not any(type(each) is not nn.Linear for each in model.modules() if isinstance(each, nn.Linear))
