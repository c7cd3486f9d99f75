"""Logits of a few tokens at a time: common parts of functions that never hold the logits of a whole batch."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from vantage.models.output_head import OutputHead

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**26}
"""Logits computed at once when `chunk_tokens` is not given, by the kind of device: 32 and 256 MiB of float32. A GPU reads the
head's weights, and adds to their gradient, once for each chunk: with 150,000 tokens in the vocabulary, 2²³ logits are
55 rows, and these reads took most of its time (docs/log/gpus_and_ranks.md)."""
KEPT_ELEMENTS = 2**26
"""Most logits of one pass that are kept for its backward pass: 256 MiB of float32. If there are more, all are
computed again."""


def default_chunk_tokens(head: OutputHead) -> int:
    """Return the number of tokens with about `CHUNK_ELEMENTS` logits on the head's device, at least one."""
    elements = CHUNK_ELEMENTS.get(head.weight.device.type, CHUNK_ELEMENTS["cpu"])
    return max(1, elements // head.weight.shape[0])


def in_autocast_type(hidden: Tensor, head: OutputHead) -> tuple[Tensor, OutputHead]:
    """Return hidden states and head in the type that autocast would give a linear layer; unchanged without autocast.

    Call this outside of hand-written autograd functions: inside them there is no autocast.
    """
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, head
    dtype = torch.get_autocast_dtype(device)
    bias = None if head.bias is None else head.bias.to(dtype)
    return hidden.to(dtype), replace(head, weight=head.weight.to(dtype), bias=bias)


def logits_and_slope(hidden: Tensor, head: OutputHead, temperature: float) -> tuple[Tensor, Tensor | float]:
    """Return z (n, V) = cap·tanh(scale·(W·h + b)/cap) / temperature, at least in float32, and dz/d(W·h + b).

    The slope is one number unless there is a cap. Both are new tensors, which may be overwritten.
    """
    logits = linear(hidden, head.weight, head.bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(head.scale)
    if head.softcap is None:
        return logits.div_(temperature), head.scale / temperature
    tanh = logits.div_(head.softcap).tanh_()
    return tanh * (head.softcap / temperature), (1 - tanh.square()).mul_(head.scale / temperature)


class HeadGradients:
    """Gradients of hidden states (N, H), weight (V, H) and bias (V,), summed up chunk by chunk.

    `needs` lists which of the three are wanted. Sums over chunks are kept in `dtype` even if the weights have another
    type.
    """

    def __init__(
        self, hidden: Tensor, head: OutputHead, *, needs: tuple[bool, bool, bool], dtype: torch.dtype
    ) -> None:
        needs_hidden, needs_weight, needs_bias = needs
        self._inputs = hidden
        self._head = head
        self._hidden = torch.empty_like(hidden) if needs_hidden else None
        self._weight = torch.zeros_like(head.weight, dtype=dtype) if needs_weight else None
        self._bias = (
            torch.zeros_like(head.bias, dtype=dtype) if head.bias is not None and needs_bias else None
        )

    def add(self, chunk: slice, grad_logits: Tensor, slope: Tensor | float) -> None:
        """Add the gradient (n, V) with respect to z of one chunk, which is overwritten."""
        grad = grad_logits.mul_(slope).to(self._head.weight.dtype)
        if self._hidden is not None:
            self._hidden[chunk] = grad @ self._head.weight
        if self._weight is not None:
            _add_product(self._weight, grad.T, self._inputs[chunk])
        if self._bias is not None:
            self._bias += grad.sum(dim=0)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias, each in the type of its tensor."""
        dtype = self._head.weight.dtype
        return (
            self._hidden,
            None if self._weight is None else self._weight.to(dtype),
            None if self._bias is None else self._bias.to(dtype),
        )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, in place and without a second (V, H) tensor if the types allow it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
