"""Load policies from the store, whole or as adapters (LoRA) on a base, to train all, only adapters, or nothing."""

from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from vantage.models.adapters import (
    Adaptation,
    add_adapters,
    check_same,
    is_adapter,
    merge_adapters,
    read_adapters,
)
from vantage.models.folder_check import UnsafeModel
from vantage.models.folders import load_policy
from vantage.models.quantisation import load_frozen, quantised_layers
from vantage.models.sharding import are_deferred
from vantage.models.shared_weights import shared
from vantage.schemas.records.model_files import ModelFiles

Training = Adaptation | Literal["all", "nothing"]
"""The trained part of a model: only adapters, all weights (adapters are merged first), or nothing."""


def load_stored_policy(
    files: ModelFiles, *, training: Training = "all", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return a causal language model; its frozen weights share memory with other networks on the same base.

    Raises:
        UnsafeModel: see `vantage.models.folders.check_folder` and `vantage.models.adapters.read_adapters`.
        ValueError: the adapters do not have the shape that is to be trained.
    """
    whole = whole_folder(files)
    if training == "all":
        return with_adapters(load_policy(whole, dtype=dtype), files, training)
    load = load_policy if are_deferred() else load_frozen  # weights are sharded in their own type
    model = shared(whole, dtype, lambda: load(whole, dtype=dtype))
    return with_adapters(model, files, training)


def whole_folder(files: ModelFiles) -> Path:
    """Return the folder of the whole model: the model's own, or that of its base.

    Raises:
        UnsafeModel: the model is only adapters, and no base is given.
    """
    if not is_adapter(files.folder):
        return files.folder
    if files.base is None:
        raise UnsafeModel(f"{files.folder} holds adapters alone; give the model that they belong to, too")
    return files.base


def with_adapters(model: PreTrainedModel, files: ModelFiles, training: Training) -> PreTrainedModel:
    """Return the whole model, or its trunk, with the adapters of its files or fresh ones; in place.

    Adapters have their weights even within `vantage.models.sharding.without_weights`.

    Raises:
        UnsafeModel, ValueError: see `load_stored_policy`.
    """
    has_some = is_adapter(files.folder)
    is_adapted = has_some or isinstance(training, Adaptation)
    if are_deferred() and is_adapted and quantised_layers(whole_folder(files)):
        raise ValueError(
            "distributed.strategy=fsdp2 cuts weights by rows, and those of a base in 4 bits (nf4) are packed without rows; "
            "use strategy: ddp, or leave model.quantization out"
        )
    if has_some:
        shape = read_adapters(model, files.folder, trainable=isinstance(training, Adaptation))
        if isinstance(training, Adaptation):
            check_same(shape, training.lora, files.folder, model)
        elif training == "all":
            merge_adapters(model)
    elif isinstance(training, Adaptation):
        add_adapters(model, training)
    return model
