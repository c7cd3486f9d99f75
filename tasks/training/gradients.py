"""Add up the ranks' gradients while the backward pass still computes others (Li et al., arXiv 2006.15704 §3.2.3).

Gradients travel in buckets, the last parameters first: about the order in which a backward pass finishes them. A bucket is sent
when it and all before it are complete, so every rank sends the same buckets in the same order, whatever the order of its own
backward pass. Only the last pass of an optimiser step sends: gradients of earlier passes are accumulated on each rank.

``torch.nn.parallel.DistributedDataParallel`` reduces in this way too, but it averages, and wants one forward pass through its
wrapper for each backward pass; a step here has passes of several networks and losses.
"""

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from vantage.tasks.training import ranks

BUCKET_ELEMENTS = 2**23
"""Gradients that are sent in one message: 32 MiB of float32."""
MOST_IN_FLIGHT = 4
"""Most buckets that are sent at the same time; each is a copy of its gradients."""

_sent: dict[int, "_Reduction"] = {}
"""Identity of each parameter whose gradient is sent already → its reduction, until the optimiser's step."""


def backward(loss: Tensor, network: nn.Module, *, is_last: bool) -> None:
    """Add the gradient of a loss to those of ``network``.

    Args:
        is_last: whether no other backward pass adds to the network's gradients before its next optimiser step. Then the sums over
            ranks begin during this pass, and ``add_gradients`` must follow. It must be equal on all ranks.
    """
    reduction = _Reduction(network.parameters()) if is_last and ranks.world_size() > 1 else None
    if reduction is None:
        loss.backward()
        return
    with reduction:
        loss.backward()
    _sent.update(dict.fromkeys(map(id, reduction.parameters), reduction))


def settle(network: nn.Module) -> None:
    """Wait for the sums that ``backward`` has begun, so that the gradients may be changed before the optimiser's step."""
    for parameter in network.parameters():
        if (reduction := _sent.get(id(parameter))) is not None:
            reduction.finish()


def add_gradients(network: nn.Module) -> None:
    """Give every rank the sum of the ranks' gradients, in place; a missing gradient counts as 0."""
    if ranks.world_size() == 1:
        return
    settle(network)
    unsent = _Reduction(each for each in network.parameters() if _sent.pop(id(each), None) is None)
    unsent.send(all_of_them=True)
    unsent.finish()


class _Reduction:
    """The sums of one network's gradients. Use it around the backward pass that completes them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # FSDP2 adds up the gradients of sharded weights itself
        self.parameters = [
            each for each in parameters if each.requires_grad and not isinstance(each, DTensor)
        ]
        self._buckets = _in_buckets(self.parameters)
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._in_flight: deque[tuple[list[nn.Parameter], Tensor, distributed.Work]] = deque()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._completed(number)))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self.send(all_of_them=True)

    def _completed(self, number: int) -> Callable[[Tensor], None]:
        """Return the hook that counts a parameter's gradient as complete."""

        def hook(parameter: Tensor) -> None:
            self._missing[number] -= 1
            self.send()

        return hook

    @torch.no_grad()
    def send(self, *, all_of_them: bool = False) -> None:
        """Send the next buckets that are complete, in their order."""
        while self._next < len(self._buckets) and (all_of_them or not self._missing[self._next]):
            bucket = self._buckets[self._next]
            self._next += 1
            while len(self._in_flight) >= MOST_IN_FLIGHT:
                self._receive()
            flat = torch.cat([gradient_of(parameter).flatten() for parameter in bucket])
            work = distributed.all_reduce(flat, async_op=True)
            assert work is not None, "asynchronous"
            self._in_flight.append((bucket, flat, work))

    def _receive(self) -> None:
        bucket, flat, work = self._in_flight.popleft()
        work.wait()
        for parameter, summed in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient_of(parameter).copy_(summed.view_as(parameter))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all sums; further calls do nothing."""
        while self._in_flight:
            self._receive()


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient; a missing one is created as 0."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _in_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters, last first, in parts of about ``BUCKET_ELEMENTS`` elements and of one type."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        if not buckets or size >= BUCKET_ELEMENTS or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel()
    return buckets
