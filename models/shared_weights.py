"""Share the weights of frozen models: a folder that is loaded twice is only once in memory.

Policy, reference, reward model and critic often have the same base. Each is a separate network, so that forward and
backward passes of one never touch another's state, but they share their frozen tensors. Nothing writes into these:
folders in the store never change, and the trained weights are separate (`vantage.models.adapters`).
"""

from collections.abc import Callable
from pathlib import Path
from weakref import ReferenceType, ref

import torch
from torch import nn
from transformers import PreTrainedModel

from vantage.models.sharding import are_deferred, without_weights

_loaded: dict[tuple[Path, torch.dtype], dict[str, ReferenceType[nn.Parameter]]] = {}
"""Folder and type → parameters that were read from it, for as long as any network uses them."""


def shared(folder: Path, dtype: torch.dtype, load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the frozen model that ``load`` reads from the folder; it shares tensors with one that was read before and
    is in use.

    Args:
        load: function that returns the same class of model each time; within `without_weights`, one without weights.
    """
    if are_deferred():
        return load().requires_grad_(False)
    key = folder.resolve(), dtype
    living = {name: found for name, held in _loaded.get(key, {}).items() if (found := held()) is not None}
    if living and len(living) == len(_loaded[key]):
        with without_weights():
            model = load()
    else:
        model = load()
    for name, parameter in living.items():
        _put(model, name, parameter)
    model.requires_grad_(False)
    parameters = model.named_parameters(remove_duplicate=False)
    _loaded[key] = {name: ref(parameter) for name, parameter in parameters}
    return model


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    place, _, last = name.rpartition(".")
    model.get_submodule(place)._parameters[last] = parameter
