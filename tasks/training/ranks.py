"""The processes (ranks) that do one stage together; with one process, every function here is the identity.

Every rank holds all rows of a batch or rollout, and decides everything by itself from the same numbers. Only expensive
work is divided: forward and backward passes (``passes``), sampling, scoring. A rank puts its results for rows into a
tensor of zeros, and the sum over ranks has all results. Losses are divided by the denominators of the whole minibatch,
so the ranks' gradients add up to that of one process.

Every function that communicates is called by all ranks, in the same order.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import Tensor, distributed

Summed = TypeVar("Summed", int, float, Tensor)
Agreed = TypeVar("Agreed", int, float)

MARGIN_SECONDS = 300.0
"""Seconds by which a waiting rank gives up later than the watchdog, which writes the stack traces of all ranks."""

_is_sharded = False


def patience(hang_seconds: float | None) -> timedelta:
    """Return the longest wait for another rank: longer than the watchdog's; a week if it has no limit."""
    return timedelta(seconds=hang_seconds + MARGIN_SECONDS) if hang_seconds else timedelta(days=7)


def join(*, hang_seconds: float | None, sharded: bool = False, rendezvous: str = "env://") -> None:
    """Become one of the ranks that the environment describes (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` …).

    With GPUs, each rank has one, and NCCL is used; otherwise CPUs and gloo. A process group that the launcher has begun
    (Ray Train) is used as it is.

    Args:
        hang_seconds: the stage's limit; see ``patience``.
        sharded: whether each rank holds a part of every network (FSDP2), and not all of it.
        rendezvous: where the ranks meet, as ``torch.distributed`` takes it.
    """
    global _is_sharded
    _is_sharded = sharded
    if distributed.is_initialized():
        return
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", distributed.get_node_local_rank(fallback_rank=0))
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if device is None else "nccl",
        rendezvous,
        timeout=patience(hang_seconds),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=device,
    )


def leave() -> None:
    """Leave the group when the stage is done; not to be called after an error, when the others may no longer answer."""
    distributed.destroy_process_group()


def is_of_communication(error: BaseException) -> bool:
    """Return whether the error means that another rank has ended or does not answer; that rank's own error has the cause."""
    is_of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return is_of_gloo or isinstance(error, distributed.DistError)


def world_size() -> int:
    """Return the number of processes that do this stage; 1 if no process group was begun."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def are_sharded() -> bool:
    """Return whether each rank holds a part of every network: then all of them make every pass together."""
    return _is_sharded and world_size() > 1


def rank() -> int:
    """Return the number of this process among the ranks, from 0."""
    return distributed.get_rank() if world_size() > 1 else 0


def own(count: int) -> slice:
    """Return the rows of this rank among ``count``; each row is of exactly one rank."""
    return slice(rank(), count, world_size())


def total(value: Summed) -> Summed:
    """Return the sum over all ranks, of the same type; a tensor may have any shape, equal on all ranks."""
    if world_size() == 1:
        return value
    summed = _tensor(value).clone()
    distributed.all_reduce(summed)
    return summed.to(value.device) if isinstance(value, Tensor) else cast(Summed, summed.item())


def any_rank(flag: bool) -> bool:
    """Return whether the flag is True on any rank."""
    return total(int(flag)) > 0


def any_of(*flags: bool) -> list[bool]:
    """Return for each flag whether it is True on any rank, with one message for all of them."""
    asked = torch.tensor([float(flag) for flag in flags], dtype=torch.float64)
    return [count > 0 for count in total(asked).tolist()]


def agreed(value: Agreed) -> Agreed:
    """Return the first rank's number on all ranks, so that decisions of a loop do not differ by rounding."""
    if world_size() == 1:
        return value
    first = _tensor(value).clone()
    distributed.broadcast(first, src=0)
    return cast(Agreed, first.item())


def agreed_text(text: str) -> str:
    """Return the first rank's text, on all ranks."""
    if world_size() == 1:
        return text
    written = list(text.encode())
    length = agreed(len(written))
    first = torch.tensor(written if rank() == 0 else [0] * length, dtype=torch.uint8, device=_device())
    distributed.broadcast(first, src=0)
    return bytes(first.tolist()).decode()


def least(value: Agreed) -> Agreed:
    """Return the smallest number of all ranks."""
    if world_size() == 1:
        return value
    smallest = _tensor(value).clone()
    distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
    return cast(Agreed, smallest.item())


def wait() -> None:
    """Wait until every rank has called this."""
    if world_size() > 1:
        distributed.barrier()


def separate_wait(hang_seconds: float | None) -> Callable[[], None]:
    """Return a function that waits until every rank has called it, in one thread of each, while other threads send messages too.

    Args:
        hang_seconds: the stage's limit; see ``patience``.
    """
    group = distributed.new_group(backend="gloo", timeout=patience(hang_seconds))
    return lambda: distributed.barrier(group=group)


def _tensor(value: int | float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(_device())
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=dtype, device=_device())


def _device() -> torch.device:
    """Return the device for the process group's messages."""
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
