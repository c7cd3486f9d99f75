"""A key-value cache with room for future tokens, so that a new token is written beside the earlier ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from vantage.models.row_lengths import on_device

ROOM = 32
"""Number of tokens for which room is made at a time. A row that ends early wastes at most this room."""


def make_room(cache: Cache, rows: Tensor, *, most: int) -> None:
    """Give every layer of a cache that has read the prompts room for up to ``most`` tokens more, in place.

    `DynamicCache` copies all keys and values for each token that it adds; this copies them once in ``ROOM`` tokens.
    Layers with more than keys and values of all tokens (sliding windows, states of other kinds) stay unchanged.

    Args:
        rows: (b,): the row of the cache for each new row; a row may be named several times.
    """
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[number] = RoomyLayer(layer, rows, most=most)
        else:
            layer.batch_select_indices(rows)  # type: ignore[union-attr]


def keep_rows(cache: Cache, kept: Sequence[int], device: torch.device) -> Tensor:
    """Keep the rows of a cache at these places, which come from ``without_gaps``; returns the places on the device.

    If a layer has room, only rows that fill gaps are copied. The memory of dropped rows is freed when room is made
    again.
    """
    places = on_device(kept, device)
    gaps = [gap for gap, place in enumerate(kept) if gap != place]
    into, moved = on_device(gaps, device), on_device([kept[gap] for gap in gaps], device)
    for layer in cache.layers:
        if isinstance(layer, RoomyLayer):
            layer.fill_gaps(into, moved, count=len(kept))
        else:
            layer.batch_select_indices(places)  # type: ignore[union-attr]
    return places


def without_gaps(active: Sequence[bool]) -> list[int]:
    """Return the places of the active rows in an order in which most rows stay in place: only the last ones move, into
    the gaps."""
    count = sum(active)
    last = iter([place for place in range(count, len(active)) if active[place]])
    return [place if active[place] else next(last) for place in range(count)]


def position_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one position's keys and values in all layers, by the configuration and the computing type."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = (getattr(config, "num_key_value_heads", None) or heads) * width
    device = model.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
    return 2 * int(config.num_hidden_layers * kept * dtype.itemsize)


def needs_mask(cache: Cache, lengths: Sequence[int], width: int) -> bool:
    """Return whether the next token needs a mask, for rows whose prompts have these lengths, padded to a width.

    If no row is padded, there is nothing to hide. If one is, transformers would check at each token whether anything is
    hidden, which makes the CPU wait for the GPU. If the cache is marked as compileable, it makes the mask without this
    check.
    """
    is_padded = min(lengths) < width
    for layer in cache.layers:
        if isinstance(layer, RoomyLayer):
            layer.is_compileable = is_padded
    return is_padded


class RoomyLayer(DynamicLayer):
    """Keys and values (B, heads, L, D) of all tokens, which are views of tensors that hold some more."""

    _held: list[Tensor]

    def __init__(self, layer: DynamicLayer, rows: Tensor, *, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert layer.keys is not None
        assert layer.values is not None
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self._remaining = most
        self._take_over(layer.keys, layer.values, rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values (B, heads, n, D) of the next n tokens; returns those of all tokens."""
        assert self.keys is not None
        assert self.values is not None
        start, count = self.keys.shape[-2], key_states.shape[-2]
        if start + count > self._held[0].shape[-2]:
            self._take_over(self.keys, self.values, None, at_least=count)
        for held, new in zip(self._held, (key_states, value_states), strict=True):
            held[:, :, start : start + count] = new
        self._remaining -= count
        self.keys, self.values = (held[:, :, : start + count] for held in self._held)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at ``indices``, in any order."""
        assert self.keys is not None
        assert self.values is not None
        self._take_over(self.keys, self.values, indices)

    def fill_gaps(self, gaps: Tensor, rows: Tensor, *, count: int) -> None:
        """Copy the rows at ``rows`` over those at ``gaps``, and keep the first ``count`` rows."""
        assert self.keys is not None
        length = self.keys.shape[-2]
        for held in self._held:
            held[gaps, :, :length] = held[rows, :, :length]
        self._held = [held[:count] for held in self._held]
        self.keys, self.values = (held[:, :, :length] for held in self._held)

    def _take_over(self, keys: Tensor, values: Tensor, rows: Tensor | None, *, at_least: int = 0) -> None:
        """Copy rows (None: all) of keys and values to larger tensors."""
        length, room = keys.shape[-2], max(at_least, min(ROOM, self._remaining))
        held = []
        for old in (keys, values):
            count = len(old) if rows is None else len(rows)
            new = old.new_empty(count, old.shape[1], length + room, old.shape[3])
            new[:, :, :length] = old if rows is None else old[rows]
            held.append(new)
        self._held = held
        self.keys, self.values = (new[:, :, :length] for new in held)
