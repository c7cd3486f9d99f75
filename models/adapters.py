"""Adapters (LoRA) in peft's format: put on a frozen model, read, checked, written, and merged.

An adapter's folder has `adapter_config.json` and `adapter_model.safetensors` as peft writes them. The names in them are
those of the causal language model, even for adapters of a reward or value model's trunk. A third file, `base.json`, has
the content digest of the whole base model. The base is found by that digest alone; a name in `adapter_config.json` is
never followed.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vantage.models.adapter_check import CONFIG, PREFIX, WEIGHTS, AdapterShape, check_adapter, is_adapter
from vantage.models.folder_check import UnsafeModel
from vantage.models.folders import check_files
from vantage.models.sharding import whole
from vantage.schemas.recipe.lora import Lora

BASE = "base.json"
NAME = "default"
"""Peft's name for the only adapter of a model."""

_merged_later: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
"""Linear layer whose weight had no storage when its adapters were merged → peft's layer with these adapters."""


@dataclass(frozen=True)
class Adaptation:
    """Adapters that a stage creates and trains for a model that has none yet."""

    lora: Lora
    seed: int
    """Seed of the random matrices A. The matrices B begin at 0, so the model's outputs are unchanged at first."""


def add_adapters(model: PreTrainedModel, adaptation: Adaptation) -> None:
    """Freeze the model's weights and put fresh adapters beside them, in place.

    Raises:
        ValueError: a target is no linear layer of the model, or is its output head.
    """
    shape = AdapterShape(adaptation.lora.rank, adaptation.lora.alpha, _targets(model, adaptation.lora))
    _inject(model, shape)
    generator = torch.Generator().manual_seed(adaptation.seed)
    for _, layer in sorted(_layers(model).items()):
        a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        with torch.no_grad():
            drawn = torch.empty(a.shape).uniform_(-1.0, 1.0, generator=generator)
            a.copy_(drawn / math.sqrt(a.shape[1]))  # peft and nn.Linear begin with the same range: ±1/√fan_in
            b.zero_()


def read_adapters(model: PreTrainedModel, folder: Path, *, trainable: bool) -> AdapterShape:
    """Put the folder's adapters on the frozen model that they were trained on, in place.

    Raises:
        UnsafeModel: the folder is refused, or its adapters do not fit the model.
    """
    check_files(folder)
    shape = check_adapter(folder)
    prefix = _prefix(model)
    modules = tuple(_without(name, prefix, folder) for name in shape.modules)
    known = dict(model.named_modules())
    for name in modules:
        if not isinstance(known.get(name), nn.Linear | Conv1D):
            raise UnsafeModel(
                f"{folder}: adapter for {name!r}, which is no linear layer of the base; use the base that it was trained on"
            )
    _inject(model, AdapterShape(shape.rank, shape.alpha, modules))
    stored = load_file(folder / WEIGHTS)
    with torch.no_grad():
        for name, layer in _layers(model).items():
            for part, matrix in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                weight, found = matrix[NAME].weight, stored[f"{PREFIX}{prefix}{name}.{part}.weight"]
                if weight.shape != found.shape:
                    raise UnsafeModel(
                        f"{folder}: {part} of {name} has the shape {tuple(found.shape)}, the base needs "
                        f"{tuple(weight.shape)}; use the base that it was trained on"
                    )
                weight.copy_(found)
    for parameter in _adapter_parameters(model):
        parameter.requires_grad_(trainable)
    return shape


def check_same(found: AdapterShape, lora: Lora, folder: Path, model: PreTrainedModel) -> None:
    """Refuse to train adapters further whose shape differs from the recipe.

    Raises:
        ValueError: rank, alpha or targets differ.
    """
    targets = {_prefix(model) + name for name in _targets(model, lora)}
    for field, asked, has in (
        ("rank", lora.rank, found.rank),
        ("alpha", lora.alpha, found.alpha),
        ("targets", sorted(targets), sorted(found.modules)),
    ):
        if asked != has:
            shown = (
                (asked, has) if field != "targets" else (lora.targets, f"{len(found.modules)} other layers")
            )
            raise ValueError(
                f"lora.{field}={shown[0]} cannot go on from adapters with {field}={shown[1]} ({folder}); "
                "use the same, or lora: false, which merges them first"
            )


def has_adapters(module: nn.Module) -> bool:
    """Return whether the module, or any part of it, has adapters."""
    return any(".lora_A." in name for name, _ in module.named_parameters())


def shape_of(model: PreTrainedModel) -> AdapterShape:
    """Return the shape of the model's adapters."""
    prefix, layers = _prefix(model), _layers(model)
    first = next(iter(layers.values()))
    return AdapterShape(first.r[NAME], first.lora_alpha[NAME], tuple(prefix + name for name in layers))


def base_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base weights, by their names in the model without adapters."""
    return {name.replace(".base_layer.", "."): each for name, each in weights.items() if ".lora_" not in name}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute without the adapters inside the block; the adapters stay as they are."""
    layers = list(_layers(model).values())
    try:
        for layer in layers:
            layer._disable_adapters = True  # `enable_adapters` would also change which weights are trained
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def change_nothing(module: nn.Module) -> bool:
    """Return whether all adapters are as they were before the first step: B = 0."""
    return not any(
        whole(parameter).any() for name, parameter in module.named_parameters() if ".lora_B." in name
    )


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a training module that change: all but the frozen weights if it has adapters, else all of them."""
    state: dict[str, Tensor] = module.state_dict()
    if not has_adapters(module):
        return state
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    # The scales of a 4-bit weight are named after it
    return {
        name: tensor
        for name, tensor in state.items()
        if name not in frozen
        and not (".weight." in name and f"{name.partition('.weight.')[0]}.weight" in frozen)
    }


def write_adapters(
    model: PreTrainedModel, folder: Path, *, base: str | None, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapters of a model or trunk; the same adapters give the same bytes. All ranks of a sharded one must call this.

    Args:
        base: content digest of the whole base model; None: unknown.
        weights: values to write instead of the model's own, by the names of its parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix, layers, given = _prefix(model), _layers(model), weights or {}
    tensors = {}
    for name, layer in sorted(layers.items()):
        for part, matrix in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            own = given.get(f"{name}.{part}.{NAME}.weight", matrix[NAME].weight)
            weight = whole(own.detach()).cpu().contiguous()
            tensors[f"{PREFIX}{prefix}{name}.{part}.weight"] = weight
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    shape = shape_of(model)
    config = _config(shape, model).to_dict()
    config["target_modules"] = _short(list(shape.modules), model)
    _write_json(folder / CONFIG, {key: config[key] for key in sorted(config)})
    _write_json(folder / BASE, {"base": base})


def base_of(folder: Path) -> str | None:
    """Return the content digest of the base model of a folder's adapters; None: the folder does not contain it."""
    path = folder / BASE
    return json.loads(path.read_text(encoding="utf-8"))["base"] if path.is_file() else None


@torch.no_grad()
def merge_adapters(model: PreTrainedModel) -> None:
    """Replace W by W + (alpha / rank)·B·A and drop the adapters, in place; no other network may share the model's
    weights.

    For a weight without storage, the product is kept for ``added_later``.
    """
    for name, layer in _layers(model).items():
        base = layer.get_base_layer()
        if base.weight.is_meta:
            _merged_later[base] = layer
        else:
            base.weight = nn.Parameter(base.weight + delta_of(layer).to(base.weight.dtype))
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, base)
    if hasattr(model, "peft_config"):
        del model.peft_config
    model.requires_grad_(True)


def added_later(layer: nn.Module) -> Tensor | None:
    """Return the matrix that merged adapters add to a layer's weight, which had no storage yet; None: there is none. A
    second call returns None."""
    adapted = _merged_later.pop(layer, None)
    return None if adapted is None else delta_of(adapted)


@torch.no_grad()
def delta_of(layer: Any) -> Tensor:
    """Return (alpha / rank)·B·A of a layer of peft, in the shape of its weight."""
    delta: Tensor = layer.get_delta_weight(NAME)
    return delta


def _inject(model: PreTrainedModel, shape: AdapterShape) -> None:
    """Wrap the named layers in layers of peft, in place; everything but the adapters is frozen."""
    from peft import inject_adapter_in_model

    config = _config(shape, model)
    with torch.random.fork_rng(devices=[]):  # peft draws first values, which are replaced
        inject_adapter_in_model(config, model, adapter_name=NAME)
    model.requires_grad_(False)
    for layer in _layers(model).values():
        for matrix in (layer.lora_A, layer.lora_B):
            # peft leaves a matrix on the meta device if the layer's weight has no storage
            if matrix[NAME].weight.is_meta:
                matrix[NAME].to_empty(device="cpu")
    for parameter in _adapter_parameters(model):
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    model.eval()


def _config(shape: AdapterShape, model: PreTrainedModel) -> Any:
    from peft import LoraConfig

    conv = any(isinstance(module, Conv1D) for module in model.modules())
    return LoraConfig(
        r=shape.rank,
        lora_alpha=int(shape.alpha) if shape.alpha == int(shape.alpha) else shape.alpha,  # type: ignore[arg-type]
        target_modules=list(shape.modules),
        fan_in_fan_out=conv,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return name → layer with an adapter."""
    from peft.tuners.lora import LoraLayer  # takes seconds to load, and few stages have adapters

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if ".lora_" in name]


def _targets(model: PreTrainedModel, lora: Lora) -> tuple[str, ...]:
    """Return names of the layers that get an adapter."""
    head = model.get_output_embeddings()
    linear = {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name and module is not head
    }
    if lora.targets == "all_linear":
        return tuple(linear)
    for target in lora.targets:
        if not any(name.rpartition(".")[2] == target for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(
                f"lora.targets: {target!r} is no linear layer of {type(model).__name__} (the output head is none of them); "
                f"use all_linear, or some of {', '.join(known)}"
            )
    return tuple(name for name in linear if name.rpartition(".")[2] in lora.targets)


def _short(modules: list[str], model: PreTrainedModel) -> list[str]:
    """Return the last parts of the layers' names, as in peft's own files, if these select the same layers; else the
    whole names."""
    last = sorted({name.rpartition(".")[2] for name in modules})
    everywhere = {
        name.replace(".base_layer", "")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name
    }
    prefix = _prefix(model)
    meant = {prefix + name for name in everywhere if name.rpartition(".")[2] in last}
    return last if meant == set(modules) else sorted(modules)


def _prefix(model: PreTrainedModel) -> str:
    """Return the prefix that the causal language model's names have before this model's: the trunk's name if this is a
    trunk."""
    is_trunk = model.base_model is model
    return f"{model.base_model_prefix}." if is_trunk else ""


def _without(name: str, prefix: str, folder: Path) -> str:
    if not name.startswith(prefix):
        raise UnsafeModel(f"{folder}: adapter for {name!r}, which is not in the trunk; use another base")
    return name.removeprefix(prefix)


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2, default=sorted)
    path.write_text(text + "\n", encoding="utf-8")


__all__ = [
    "Adaptation",
    "add_adapters",
    "added_later",
    "base_of",
    "base_weights",
    "change_nothing",
    "check_same",
    "has_adapters",
    "is_adapter",
    "kept_tensors",
    "merge_adapters",
    "read_adapters",
    "shape_of",
    "without_adapters",
    "write_adapters",
]
