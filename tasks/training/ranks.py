"""What the processes (ranks) that train one network add up and agree on; with one process, all of it is the identity.

Each rank holds some rows of a minibatch, at least one, and divides its losses by the denominator of the whole. So the
ranks' gradients add up to that of the minibatch: whatever shards or copies the network has to add them, not to average
them (FSDP2: ``set_gradient_divide_factor(1.0)``). Every function here is called by all ranks, in the same order.
"""

from typing import TypeVar, cast

import torch
from torch import Tensor, distributed

Summed = TypeVar("Summed", int, float, Tensor)
Agreed = TypeVar("Agreed", int, float)


def world_size() -> int:
    """Processes that train one network; 1 where no process group was begun."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def total(value: Summed) -> Summed:
    """The sum over all ranks, of the same type; a tensor may have any shape, equal on all ranks."""
    if world_size() == 1:
        return value
    summed = _tensor(value).clone()
    distributed.all_reduce(summed)
    return summed if isinstance(value, Tensor) else cast(Summed, summed.item())


def any_rank(flag: bool) -> bool:
    """Whether it is so on any rank."""
    return total(int(flag)) > 0


def agreed(value: Agreed) -> Agreed:
    """The first rank's number, on all ranks: what decides how a loop goes on must not differ by a rounding."""
    if world_size() == 1:
        return value
    first = _tensor(value).clone()
    distributed.broadcast(first, src=0)
    return cast(Agreed, first.item())


def gathered(values: Tensor) -> Tensor:
    """One number a response or token of this rank, (N,) → those of all ranks in their order; N may differ."""
    if world_size() == 1:
        return values
    count = torch.tensor([len(values)], device=_device())
    counts = [torch.zeros_like(count) for _ in range(world_size())]
    distributed.all_gather(counts, count)
    lengths = [int(each) for each in counts]
    padded = torch.zeros(max(lengths), dtype=values.dtype, device=_device())
    padded[: len(values)] = values
    parts = [torch.zeros_like(padded) for _ in lengths]
    distributed.all_gather(parts, padded)
    whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return whole.to(values.device)


def mean(values: Tensor) -> float:
    """The mean of one number a response or token, (N,), over those of all ranks."""
    return gathered(values).mean().item()


def wait() -> None:
    """Go on when every rank has come here."""
    if world_size() > 1:
        distributed.barrier()


def _tensor(value: int | float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=dtype, device=_device())


def _device() -> torch.device:
    """Where the process group's messages have to be."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
