"""Keep sharded weights gathered between the passes of sampling, if each rank has memory for all of them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

MARGIN = 0.1
"""Share of the free memory that stays free, since the allocator cannot join all blocks."""


@dataclass
class _Gathering:
    """A sharded network, and the way in which its weights are gathered."""

    network: ReferenceType[nn.Module]
    dtype: torch.dtype | None
    """Type of the gathered weights; None: each weight's own."""
    can_keep: bool = True
    """False once memory did not suffice: later measurements of memory rely on weights that are not kept."""


_gatherings: "WeakKeyDictionary[PreTrainedModel, _Gathering]" = WeakKeyDictionary()
"""Each language model within a sharded network → how that network is gathered."""


def note_gathering(network: nn.Module, dtype: torch.dtype | None) -> None:
    """Note that a network was sharded, and the type in which its float32 weights are gathered; None: their own."""
    for model in network.modules():
        if isinstance(model, PreTrainedModel):
            _gatherings[model] = _Gathering(ref(network), dtype)


def gathered_bytes(network: nn.Module, dtype: torch.dtype | None) -> int:
    """Return the bytes of all weights of a sharded network once they are gathered."""
    return sum(
        each.numel() * (dtype.itemsize if dtype and each.dtype == torch.float32 else each.element_size())
        for each in network.parameters()
    )


@contextlib.contextmanager
def kept_gathered(model: PreTrainedModel, *, beside: int) -> Iterator[None]:
    """Keep the weights of the sharded network around ``model`` gathered from one pass to the next inside the block.

    The first pass gathers them, the block's end frees them; the results have the same bits. On a GPU, every rank needs
    memory for all of them and also for as much again or ``beside``, if that is more; otherwise each pass gathers them
    as before. All ranks must enter the block together.

    Args:
        beside: bytes that the passes need for other things.
    """
    from torch.distributed.fsdp import FSDPModule  # importing it takes half a second

    found = _gatherings[model]
    network = found.network()
    assert isinstance(network, FSDPModule)
    found.can_keep = found.can_keep and _has_room(gathered_bytes(network, found.dtype), beside, model.device)
    if not found.can_keep:
        yield
        return
    network.set_reshard_after_forward(False)
    try:
        yield
    finally:
        network.set_reshard_after_forward(True)
        for part in network.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _has_room(num_bytes: int, beside: int, device: torch.device) -> bool:
    """Return whether memory suffices on every rank. A CPU's memory is not measured, since it has swap space."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fits: Tensor = torch.tensor(suffices(num_bytes, beside, free), dtype=torch.int32, device=device)
    distributed.all_reduce(fits, op=distributed.ReduceOp.MIN)
    return bool(fits.item())


def suffices(num_bytes: int, beside: int, free: int) -> bool:
    """Return whether ``free`` bytes hold the gathered weights and also as much again or ``beside``, if that is more,
    with a margin.

    With less than as much again, so few responses would be sampled at once that gathering in each pass costs less.
    """
    return num_bytes + max(num_bytes, beside) <= free * (1 - MARGIN)
