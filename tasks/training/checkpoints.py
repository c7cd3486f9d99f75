"""Save and load in-stage checkpoints: everything that changes while a stage trains, so that a resumed stage is bitwise equal.

A checkpoint is tensors (safetensors) and state (JSON), never a pickle. Both consist of *parts*: a tensor's part is
its name up to the first ``/`` (``policy.weights/lm_head.weight``), a state's part is its key. The loading stage lists
the parts that must exist; a missing or an unknown part is refused by name.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vantage.models.adapters import kept_tensors
from vantage.models.sharding import like, local, own_rows
from vantage.schemas.canonical_json import canonical_json
from vantage.storage.durable_files import write_file
from vantage.tasks.training import ranks
from vantage.tasks.training.checkpoint_folders import (
    SAVING,
    STATE,
    TENSORS,
    Checkpoint,
    commit,
    latest,
    saving_folder,
)
from vantage.tasks.training.optimizer_state import KnowsLayout

__all__ = [
    "Checkpoint",
    "Content",
    "IncompleteCheckpoint",
    "Loaded",
    "content_of",
    "latest",
    "load",
    "module_tensors",
    "optimizer_tensors",
    "restore_module",
    "restore_optimizer",
    "save",
    "write",
    "write_shards",
]

_SHARD = "tensors-{rank}.safetensors"
_HAS_STATE = "has_state"


class IncompleteCheckpoint(ValueError):
    """A checkpoint lacks a part that training needs, or holds a part that nothing would read."""


@dataclass(frozen=True)
class Loaded:
    """Content of a checkpoint."""

    step: int
    tensors: dict[str, Tensor]
    """Tensors on the CPU; none shares memory with another."""
    state: dict[str, Any]


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint, checked and ready to be written."""

    step: int
    tensors: dict[str, Tensor]
    """Each tensor once, contiguous; training changes the values of tensors that are not copied."""
    description: bytes
    fixed: frozenset[str] = frozenset()
    """Parts in host memory that are replaced as a whole, and never edited in place."""

    @property
    def bytes_to_copy(self) -> int:
        """Bytes that ``copied`` takes."""
        moving = (each for name, each in self.tensors.items() if _part(name) not in self.fixed)
        return sum(each.numel() * each.element_size() for each in moving)

    def copied(self) -> "Content":
        """Return a copy of the present content in host memory, which training does not change."""
        copies = {
            name: each if _part(name) in self.fixed else each.to("cpu", copy=True)
            for name, each in self.tensors.items()
        }
        return replace(self, tensors=copies)


def save(
    folder: Path, *, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int = 2
) -> Checkpoint:
    """Write ``checkpoint-<step>/`` whole or not at all, then remove all but the newest ``keep``.

    Tied weights are written once. The same step may be saved again; the later one wins.

    Raises:
        ValueError: see ``content_of``.
        OSError: see ``write``.
    """
    return write(folder, content_of(step=step, tensors=tensors, state=state), keep=keep)


def content_of(
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    is_shard: Callable[[str], bool] | None = None,
    fixed: Iterable[str] = (),
) -> Content:
    """Return the content of a checkpoint; its tensors share the memory of those given.

    Args:
        step: steps done; never less than the newest checkpoint's.
        tensors: ``part/name`` → tensor, on any device; for a sharded tensor, this rank's shard.
        state: part → JSON; floats come back exactly. With shards, the state of the first rank is written.
        is_shard: tensor's name → whether it is this rank's shard of a tensor that is spread over the ranks; None: none
            is.
        fixed: parts in host memory that are replaced as a whole, and never edited in place.

    Raises:
        ValueError: the state is not JSON (NaN and infinity are not), a tensor's name has no part, or tensors and state
            share a part.
    """
    unnamed = [name for name in tensors if "/" not in name]
    if unnamed:
        raise ValueError(f"tensor {unnamed[0]!r} belongs to no part; name it 'part/name'")
    shared = {_part(name) for name in tensors} & set(state)
    if shared:
        raise ValueError(f"{', '.join(sorted(shared))}: both tensors and state have this part; rename one")
    unique, aliases = _without_aliases(tensors)
    description = {"step": step, "state": dict(state), "aliases": aliases}
    if is_shard is not None:
        description["shards"] = {"files": ranks.world_size(), "cut": sorted(filter(is_shard, unique))}
    return Content(step, unique, canonical_json(description).encode(), frozenset(fixed))


def write(folder: Path, content: Content, *, keep: int = 2) -> Checkpoint:
    """Write a checkpoint whole or not at all, then remove all but the newest ``keep``.

    Args:
        folder: holds the stage's checkpoints.
        content: what to write.
        keep: number of checkpoints that stay.

    Raises:
        OSError: the disk is full or broken; earlier checkpoints are unchanged.
    """
    new = saving_folder(folder)
    save_file(content.tensors, new / TENSORS)
    write_file(new / STATE, content.description)
    return commit(folder, step=content.step, keep=keep)


def write_shards(folder: Path, content: Content, *, wait: Callable[[], None], keep: int = 2) -> None:
    """Write like ``write``, with one file for each rank's parts of the tensors; all ranks must call this.

    Args:
        wait: function that waits until every rank has called it.
    """
    if ranks.rank() == 0:
        saving_folder(folder)
    wait()
    new = folder / SAVING
    save_file(content.tensors, new / _SHARD.format(rank=ranks.rank()))
    wait()
    if ranks.rank() == 0:
        write_file(new / STATE, content.description)
        commit(folder, step=content.step, keep=keep)


def load(
    checkpoint: Checkpoint, *, required: Iterable[str], is_shard: Callable[[str], bool] = lambda _: False
) -> Loaded:
    """Read a checkpoint that ``latest`` has checked, whatever number of ranks saved it.

    Args:
        is_shard: tensor's name → whether only this rank's rows of the tensor are wanted.

    Raises:
        IncompleteCheckpoint: the checkpoint's parts differ from the required ones.
    """
    description = json.loads((checkpoint.folder / STATE).read_bytes())
    shards = description.get("shards")
    names = [TENSORS] if shards is None else [_SHARD.format(rank=rank) for rank in range(shards["files"])]
    cut = set() if shards is None else set(shards["cut"])
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(checkpoint.folder / name, "pt")) for name in names]
        named = {**{name: name for name in files[0].keys()}, **description["aliases"]}  # noqa: SIM118
        tensors = {
            name: _read(files if origin in cut else files[:1], origin, own=is_shard(name))
            for name, origin in named.items()
        }
    state = description["state"]
    _require(checkpoint, required=set(required), found={*map(_part, tensors), *state})
    return Loaded(step=description["step"], tensors=tensors, state=state)


def _read(files: Sequence[Any], name: str, *, own: bool) -> Tensor:
    """Return a tensor whose rows are distributed over the files, in order: all of it, or this rank's own rows."""
    if not own and len(files) == 1:
        whole: Tensor = files[0].get_tensor(name)
        return whole.clone()
    slices = [file.get_slice(name) for file in files]
    counts = [each.get_shape()[0] for each in slices]
    wanted = own_rows(sum(counts)) if own else slice(0, sum(counts))
    found, before = [], 0
    for each, count in zip(slices, counts, strict=True):
        start = min(max(wanted.start - before, 0), count)
        found.append(each[start : max(start, min(wanted.stop - before, count))])
        before += count
    return torch.cat(found)


def module_tensors(module: nn.Module, *, part: str) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of a network as ``part/name``; for a sharded network, this rank's rows.

    For a network with adapters, frozen tensors are left out.
    """
    return {f"{part}/{name}": local(tensor.detach()) for name, tensor in kept_tensors(module).items()}


def restore_module(module: nn.Module, tensors: Mapping[str, Tensor], *, part: str) -> None:
    """Copy a part's tensors into the network, in place; tied weights, devices and the optimiser's references are kept.

    Raises:
        IncompleteCheckpoint: a tensor is missing, left over, or of another shape or type.
    """
    saved = _of_part(tensors, part)
    targets = {name: local(tensor) for name, tensor in kept_tensors(module).items()}
    _require_names(part, required=targets.keys(), found=saved.keys())
    for name, target in targets.items():
        if (target.shape, target.dtype) != (saved[name].shape, saved[name].dtype):
            raise IncompleteCheckpoint(
                f"{part}/{name} is {tuple(saved[name].shape)} {saved[name].dtype} in the checkpoint, "
                f"{tuple(target.shape)} {target.dtype} in the network"
            )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(saved[name])


def optimizer_tensors(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]], *, part: str
) -> dict[str, Tensor]:
    """Return an optimiser's changing values as ``part/name``: each parameter's state by the parameter's name, and the numbers
    of each group (learning rate, betas …), as float64.

    ``part/has_state`` lists the parameters that have state (none before the first step), so that a lost one
    is noticed.

    Args:
        optimizer: AdamW, or another optimiser whose state consists of tensors.
        named_parameters: parameters of all networks that the optimiser trains.
        part: name of the part in the checkpoint.
    """
    names = _names_in_order(optimizer, named_parameters)
    described = optimizer.state_dict()
    tensors = {
        f"{part}/{names[index]}/{key}": local(tensor)
        for index, entries in described["state"].items()
        for key, tensor in entries.items()
    }
    for number, group in enumerate(described["param_groups"]):
        for key, value in _numbers(group).items():
            tensors[f"{part}/group.{number}/{key}"] = torch.as_tensor(value, dtype=torch.float64)
    has_state = [index in described["state"] for index in range(len(names))]
    tensors[f"{part}/{_HAS_STATE}"] = torch.tensor(has_state, dtype=torch.bool)
    return tensors


def restore_optimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]],
    tensors: Mapping[str, Tensor],
    *,
    part: str,
) -> None:
    """Restore exactly the values from ``optimizer_tensors``; the optimiser's implementation (fused, foreach) stays as
    it is.

    Raises:
        IncompleteCheckpoint: a parameter's state or a group's number is missing, left over or of another shape.
    """
    names = _names_in_order(optimizer, named_parameters)
    saved = _of_part(tensors, part)
    described = optimizer.state_dict()
    if _HAS_STATE not in saved or saved[_HAS_STATE].numel() != len(names):
        raise IncompleteCheckpoint(f"{part}/{_HAS_STATE} is missing, or is not of {len(names)} parameters")
    with_state = [name for name, has in zip(names, saved.pop(_HAS_STATE).tolist(), strict=True) if has]
    keys = _state_keys(saved, with_state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = {
        name: _state_shapes(optimizer, parameter, keys)
        for name, parameter in zip(names, parameters, strict=True)
        if name in set(with_state)
    }
    numbers = {
        f"group.{number}/{key}"
        for number, group in enumerate(described["param_groups"])
        for key in _numbers(group)
    }
    required = {f"{name}/{key}" for name in with_state for key in shapes[name]} | numbers
    _require_names(part, required=required, found=saved.keys())

    for name, expected in shapes.items():
        for key, shape in expected.items():
            tensor = saved[f"{name}/{key}"]
            if tensor.shape not in (shape, torch.Size()):
                raise IncompleteCheckpoint(
                    f"{part}/{name}/{key} has the shape {tuple(tensor.shape)}, its parameter needs {tuple(shape)}"
                )
    state = {
        index: {key: _for_state(saved[f"{name}/{key}"].clone(), parameter) for key in shapes[name]}
        for index, (name, parameter) in enumerate(zip(names, parameters, strict=True))
        if name in shapes
    }
    groups = [
        {
            **group,
            **{key: _like(value, saved[f"group.{number}/{key}"]) for key, value in _numbers(group).items()},
        }
        for number, group in enumerate(described["param_groups"])
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _state_shapes(optimizer: Optimizer, parameter: Tensor, keys: Iterable[str]) -> dict[str, torch.Size]:
    """Return the shapes of a parameter's state on this rank: the parameter's own, unless the optimiser has another layout."""
    if isinstance(optimizer, KnowsLayout):
        return {key: tensor.shape for key, tensor in optimizer.layout(parameter).items()}
    return {key: local(parameter).shape for key in keys}


def _for_state(saved: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor of an optimiser's state, sharded like its parameter; a number stays a number.

    A tensor that is not sharded stays in host memory: the optimiser moves it to the device of its state.
    """
    if not saved.dim() or not isinstance(parameter, DTensor):
        return saved
    return like(parameter, saved.to(local(parameter).device))


def _part(name: str) -> str:
    return name.split("/", 1)[0]


def _of_part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.split("/", 1)[1]: tensor for name, tensor in tensors.items() if _part(name) == part}


def _require(checkpoint: Checkpoint, *, required: set[str], found: set[str]) -> None:
    missing, unexpected = sorted(required - found), sorted(found - required)
    if missing or unexpected:
        faults = [f"{part} is missing" for part in missing] + [
            f"{part} is not expected" for part in unexpected
        ]
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: {', '.join(faults)}; it was saved by another version of this stage, "
            "remove the folder to start the stage from the beginning"
        )


def _require_names(part: str, *, required: Iterable[str], found: Iterable[str]) -> None:
    missing, unexpected = sorted(set(required) - set(found)), sorted(set(found) - set(required))
    if missing:
        raise IncompleteCheckpoint(
            f"{part}/{missing[0]} is missing in the checkpoint ({len(missing)} in all)"
        )
    if unexpected:
        raise IncompleteCheckpoint(
            f"{part}/{unexpected[0]} in the checkpoint fits nothing ({len(unexpected)} in all)"
        )


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, contiguous and in separate memory, and alias → the name under which it is saved."""
    seen: dict[tuple[Any, ...], str] = {}
    storages: set[tuple[Any, ...]] = set()
    unique, aliases = {}, {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        view = (*storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and view in seen:
            aliases[name] = seen[view]
            continue
        seen[view] = name
        unique[name] = tensor.clone() if storage in storages else tensor
        unique[name] = unique[name].contiguous()
        storages.add(storage)
    return unique, aliases


def _names_in_order(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the parameters' names in the order of the optimiser's groups, which is that of its ``state_dict``."""
    names = {id(parameter): name for name, parameter in named_parameters}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = sum(id(parameter) not in names for parameter in parameters)
    if unknown:
        raise ValueError(
            f"the optimiser trains {unknown} parameters that named_parameters does not name; name all"
        )
    ordered = [names[id(parameter)] for parameter in parameters]
    if len(set(ordered)) != len(ordered):
        raise ValueError(
            "two of the optimiser's parameters have the same name; prefix the names of each network"
        )
    return ordered


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group that are numbers (or a tensor, or a tuple of numbers), not flags."""
    return {
        key: value
        for key, value in group.items()
        if (key != "params" and _is_number(value))
        or (isinstance(value, tuple) and all(map(_is_number, value)))
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def _like(value: Any, saved: Tensor) -> Any:
    """Return ``saved`` as a number of the same kind as ``value``."""
    if isinstance(value, Tensor):
        return saved.to(dtype=value.dtype, device=value.device)
    if isinstance(value, tuple):
        return tuple(saved.tolist())
    return saved.item()


def _state_keys(saved: Mapping[str, Tensor], with_state: list[str]) -> list[str]:
    """Return the names of the tensors that the optimiser keeps for each parameter (``exp_avg``, ``step`` …)."""
    known = set(with_state)
    return sorted({name.rsplit("/", 1)[1] for name in saved if name.rsplit("/", 1)[0] in known})
