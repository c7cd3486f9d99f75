"""Layout of the state of optimisers other than AdamW: which tensors they keep for a parameter, and how large these
are."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from vantage.models.sharding import local
from vantage.tasks.training.host_optimizer import HostAdamW


@runtime_checkable
class KnowsLayout(Protocol):
    """An optimiser whose state has other tensors than two moments of the parameter's shape."""

    def layout(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """Return the state's tensors of a parameter, by name, without memory (on the device ``meta``)."""


def state_bytes(optimizer: Optimizer, parameter: Tensor) -> int:
    """Return the bytes that the state of a parameter takes on its device, from the first step on, on this rank."""
    if isinstance(optimizer, HostAdamW):
        return 0
    if isinstance(optimizer, KnowsLayout):
        return sum(each.numel() * each.element_size() for each in optimizer.layout(parameter).values())
    return 2 * local(parameter).numel() * parameter.element_size()
