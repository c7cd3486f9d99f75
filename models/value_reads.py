"""Refuse operations that a captured step must not contain: those that read the values of tensors.

A GPU graph is replayed without Python. A number that Python read during the capture, or a shape that depended on
values, would stay that of the captured token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
READS = {
    ATEN._local_scalar_dense,  # item(), int(), float(), bool() and a tensor as a condition
    ATEN.equal,
    ATEN.is_nonzero,
}
SHAPED_BY_VALUES = {
    ATEN.nonzero,
    ATEN.masked_select,
    ATEN._unique2,
    ATEN.unique_dim,
    ATEN.unique_consecutive,
    ATEN.repeat_interleave,
}
INDEXED = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_, ATEN._unsafe_index}


class LooksAtValues(RuntimeError):
    """A step read values of its tensors."""


class NoValueReads(TorchDispatchMode):
    """Refuses operators that need the values of tensors, in this thread and inside the block."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, unless it reads values."""
        if reads_values(func, args, kwargs or {}):
            raise LooksAtValues(f"its forward pass looks at the values of tensors ({func})")
        return func(*args, **(kwargs or {}))


def reads_values(func: Any, args: Sequence[Any], named: dict[str, Any]) -> bool:
    """Return whether an operator must wait for the values of its tensors."""
    packet = func.overloadpacket
    is_shaped = packet in SHAPED_BY_VALUES and named.get("output_size") is None
    return packet in READS or is_shaped or (packet in INDEXED and _by_mask(packet, args))


def _by_mask(packet: Any, args: Sequence[Any]) -> bool:
    """Return whether a tensor is indexed by a boolean mask; assigning one number to all True places needs no wait."""
    masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
    fills = packet is not ATEN.index and len(masks) == 1 and args[2].numel() == 1
    return bool(masks) and not fills
