"""Shard networks: each rank holds, reads and saves a part of every weight (FSDP2).

Weights are split by rows, as by ``torch.chunk``. A network is built without weights (`without_weights`), sharded,
and then each rank reads its own rows from the safetensors: no process ever holds the whole network.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from vantage.models.folder_check import UnsafeModel, read_tensors
from vantage.models.gathered_weights import note_gathering

_deferred: ContextVar[bool] = ContextVar("_deferred", default=False)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Let `vantage.models.folders.load_weights` build networks with parameters without storage inside the block;
    buffers have storage."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


@contextlib.contextmanager
def parameters_without_storage() -> Iterator[None]:
    """Remove the storage of a module's parameters as they are registered, inside the block; buffers, which no file has,
    keep theirs."""
    register = nn.Module.register_parameter

    def register_without(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    vars_of_class: Any = nn.Module
    vars_of_class.register_parameter = register_without
    try:
        yield
    finally:
        vars_of_class.register_parameter = register


def are_deferred() -> bool:
    """Return whether this is within `without_weights`."""
    return _deferred.get()


def is_sharded(module: nn.Module) -> bool:
    """Return whether the module's weights are spread over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def shard(
    module: nn.Module,
    *,
    device: torch.device,
    methods: tuple[str, ...] = (),
    gathered: torch.dtype | None = None,
) -> None:
    """Shard a network over all ranks: each layer separately, and the rest as one part; gradients are summed over ranks.

    With ``gathered``, all passes compute in this type under autocast, and float32 weights of the language model are rounded to it
    before they are sent. The stream between the layers stays float32, as autocast alone would keep it, and so do the scalar heads.

    Args:
        methods: names of methods that read weights, besides ``forward``.
        gathered: type in which weights are gathered; gradients are summed in float32. None: each weight's own type.
    """
    from torch.distributed.fsdp import (  # importing it takes half a second
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = _mesh(device.type)
    policy = MixedPrecisionPolicy()
    if gathered is not None:
        policy = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
        _compute_in(module, gathered, device, methods=("forward", *methods))
        for head in module.children():
            if not isinstance(head, PreTrainedModel) and any(True for _ in head.parameters()):
                fully_shard(head, mesh=mesh)
    for buffer_owner in module.modules():
        for name, buffer in buffer_owner.named_buffers(recurse=False):
            buffer_owner.register_buffer(
                name, buffer.to(device), persistent=name not in buffer_owner._non_persistent_buffers_set
            )
    for part in list(module.modules()):
        if type(part).__name__ in _layer_classes(module):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
    for method in methods:
        register_fsdp_forward_method(module, method)
    note_gathering(module, gathered)


def hold_frozen_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change the type of frozen weights that have no storage yet; those of adapters stay.

    Use this for weights that are gathered in this type and never saved: results keep their bits, with less memory.
    """
    for parameter in model.parameters():
        if parameter.is_meta and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _compute_in(
    module: nn.Module, dtype: torch.dtype, device: torch.device, *, methods: tuple[str, ...]
) -> None:
    """Let these methods of a network compute under autocast, and its embeddings return float32."""

    def within(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def computed(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype=dtype):
                return method(*args, **kwargs)

        return computed

    for name in methods:
        setattr(module, name, within(getattr(module, name)))
    for model in module.modules():
        if isinstance(model, PreTrainedModel) and model.base_model is model:
            model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.float())


def read_own_rows(
    module: nn.Module,
    model: PreTrainedModel,
    folder: Path,
    *,
    added: Callable[[nn.Module], Tensor | None] = lambda _: None,
) -> int:
    """Give the sharded ``model`` within ``module`` this rank's rows of the folder's weights; returns the bytes read.

    Adapters have their weights already; the folder is that of the base model.

    Args:
        added: function from a layer to a matrix to add to its weight, as for merged adapters.

    Raises:
        UnsafeModel: the folder has a weight under another name than the model.
    """
    stored = read_tensors(folder)
    place = next(name for name, part in module.named_modules() if part is model)
    read: dict[int, nn.Parameter] = {}
    state: dict[str, Tensor] = {}
    num_bytes = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor)
        if ".lora_" in name:
            continue
        if id(parameter) not in read:
            local = _own_rows(folder, stored, model, name, parameter)
            layer, _, last = name.rpartition(".")
            if last == "weight" and (more := added(model.get_submodule(layer))) is not None:
                local = local + more[own_rows(len(more))].to(local)
            num_bytes += local.numel() * local.element_size()
            read[id(parameter)] = nn.Parameter(like(parameter, local), requires_grad=parameter.requires_grad)
        state[f"{place}.{name}" if place else name] = read[id(parameter)]
    module.load_state_dict(state, strict=False, assign=True)
    return num_bytes


def _own_rows(folder: Path, stored: dict, model: PreTrainedModel, name: str, parameter: DTensor) -> Tensor:  # type: ignore[type-arg]
    names = [each.replace(".base_layer.", ".") for each in (name, *_tied_names(model, name))]
    candidates = (names[0], f"{model.base_model_prefix}.{names[0]}", *names[1:])
    found = next((each for each in candidates if each in stored), None)
    if found is None:
        raise UnsafeModel(
            f"{folder} has no weight called {name}, so it cannot be read part by part; "
            "use distributed.strategy: ddp, or save the model with the installed transformers"
        )
    with safe_open(folder / stored[found].file, framework="pt") as file:
        rows = file.get_slice(found)[own_rows(parameter.shape[0])]
    local: Tensor = rows.to(dtype=parameter.dtype, device=parameter.device_mesh.device_type)
    return local


def _tied_names(model: PreTrainedModel, name: str) -> list[str]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [other for other, parameter in parameters.items() if parameter is parameters[name]]


def own_rows(count: int) -> slice:
    """Return this rank's part of ``count`` rows of a weight."""
    each = -(-count // distributed.get_world_size())
    start = min(distributed.get_rank() * each, count)
    return slice(start, min(start + each, count))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a weight; a whole tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return, on each rank, the whole of a tensor that may be spread over ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(sharded: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is sharded as ``sharded`` is, from this rank's part; if ``sharded`` is whole, the part
    itself."""
    if not isinstance(sharded, DTensor):
        return part
    return DTensor.from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's weights on the first rank's CPU, gathered one by one; nothing on the other ranks."""
    found: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in module.state_dict().items():
        first = names.setdefault(id(parameters.get(name, tensor)), name)
        if first != name:  # tied weights remain one tensor
            if first in found:
                found[name] = found[first]
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if distributed.get_rank() == 0:
            found[name] = whole.cpu()
        del whole
    return found


def _layer_classes(module: nn.Module) -> set[str]:
    models = (part for part in module.modules() if isinstance(part, PreTrainedModel))
    return {name for model in models for name in model._no_split_modules or ()}


@cache
def _mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (distributed.get_world_size(),))
