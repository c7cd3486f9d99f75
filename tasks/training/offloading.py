"""Frozen networks whose weights are in host memory, and are copied to the device for their passes.

The results have the same bits as those of a network on the device. Nothing is copied back, since nothing trains.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


class HostWeights:
    """The weights of one network, in host memory."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        """Give the network its own weights in host memory, and put its buffers on the device.

        Raises:
            ValueError: a weight has another form than a plain tensor, such as 4 bits.
        """
        self._device = device
        self._visits = 0
        own: dict[int, nn.Parameter] = {}
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if type(parameter) is not nn.Parameter:
                    raise ValueError(
                        f"resources.offload moves plain weights, and {name} is a {type(parameter).__name__}; leave offload out"
                    )
                if id(parameter) not in own:  # tied weights stay one parameter
                    own[id(parameter)] = nn.Parameter(_in_host(parameter.data, device), requires_grad=False)
                module._parameters[name] = own[id(parameter)]
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._weights = [(parameter, parameter.data) for parameter in own.values()]
        network.register_forward_pre_hook(self._refuse)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the weights on the device inside the block; blocks may be nested."""
        self._visits += 1
        try:
            if self._visits == 1:
                for parameter, weight in self._weights:
                    parameter.data = on(self._device, weight)
            yield
        finally:
            self._visits -= 1
            if not self._visits:
                for parameter, weight in self._weights:
                    parameter.data = weight

    def _refuse(self, *_: Any) -> None:
        assert self._visits, "an offloaded network computes inside on_device alone"


_offloaded: "WeakKeyDictionary[nn.Module, HostWeights]" = WeakKeyDictionary()


def offloaded(network: Network, device: torch.device) -> Network:
    """Return the frozen network, whose weights are on the device only inside ``on_device``."""
    _offloaded[network] = HostWeights(network, device)
    return network


@contextmanager
def on_device(network: nn.Module) -> Iterator[None]:
    """Keep the network's weights on its device inside the block; does nothing for a network that is not offloaded."""
    weights = _offloaded.get(network)
    if weights is None:
        yield
        return
    with weights.on_device():
        yield


def on(device: torch.device, weight: Tensor) -> Tensor:
    """Return a copy of a weight from host memory on the device; the copy is queued with the device's other work."""
    return weight.to(device, non_blocking=True)


def _in_host(weight: Tensor, device: torch.device) -> Tensor:
    """Return a weight in host memory; for a GPU in pinned pages, from which copies are fast."""
    in_host = weight.detach().cpu()
    return in_host.pin_memory() if device.type == "cuda" else in_host
