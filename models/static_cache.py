"""A key-value cache at fixed addresses: its tensors have room for all tokens that may follow, and a mask hides the
unused columns.

A captured step reads and writes fixed addresses. So the keys and values of every layer always begin at the same address,
whatever the number of rows and the length; if rows leave or the length grows, data is moved inside one tensor.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

STEP = 128
"""Every length of the cache is a multiple of this number of tokens."""
STEPS_IN_A_DOUBLING = 4
"""Most lengths between a length and its double. Longer caches grow in larger steps: few lengths are captured."""


@dataclass(frozen=True)
class Bucket:
    """The shape of a cache."""

    rows: int
    length: int


def length_for(tokens: int, *, most: int) -> int:
    """Return the length of a cache for ``tokens`` tokens now and at most ``most`` tokens later."""
    octave = 1 << (max(tokens, 1).bit_length() - 1)
    step = max(STEP, octave // STEPS_IN_A_DOUBLING)
    return min(_multiple(tokens, step), _multiple(most, STEP))


def _multiple(number: int, step: int) -> int:
    return -(-number // step) * step


def holds_all_tokens(cache: Cache) -> bool:
    """Return whether all layers hold keys and values of all tokens: no sliding windows, no other states."""
    return all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers)


class FixedLayer(StaticLayer):
    """Keys and values (b, heads, L, D); a tensor holds the column of the next token's keys and values."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        """Hold the cache of one layer. ``column`` (1,) is shared by all layers; its owner advances it."""
        super().__init__(max_cache_len=keys.shape[-2])
        self.keys, self.values, self.column = keys, values, column
        self.cumulative_length = column  # type: ignore[assignment]  # transformers' own class uses a tensor, too
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the next token's keys and values (b, heads, 1, D); returns the keys and values of all columns."""
        assert self.keys is not None
        assert self.values is not None
        if key_states.shape[-2] != 1:
            raise ValueError(f"{key_states.shape[-2]} tokens at once, and a step has one")
        self.keys.index_copy_(2, self.column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, value_states.to(self.values.dtype))
        return self.keys, self.values


class StaticCache:
    """Keys and values of all layers, laid out for one bucket at a time."""

    def __init__(self, prompts: Cache, *, dtype: torch.dtype | None) -> None:
        """Make room for the cache of some prompts.

        Args:
            dtype: type in which keys and values are kept; None: each one's own type.
        """
        kept = [tensors_of(layer) for layer in prompts.layers]
        self._kinds = [(_kind(keys, dtype), _kind(values, dtype)) for keys, values in kept]
        self._held: list[tuple[Tensor, Tensor]] = []
        self._capacity = 0
        self.device = kept[0][0].device
        self.bucket = Bucket(0, 0)
        self.column = torch.zeros(1, dtype=torch.long, device=self.device)
        """(1,): where the next token's keys and values are written, in all layers."""

    def fits(self, bucket: Bucket) -> bool:
        """Return whether this bucket keeps the addresses unchanged."""
        return bucket.rows * bucket.length <= self._capacity

    def load(self, prompts: Cache, rows: Tensor, bucket: Bucket) -> None:
        """Copy the keys and values of the prompts at ``rows`` (b,)."""
        kept = (tensors_of(layer) for layer in prompts.layers)
        self._fill(((keys[rows], values[rows]) for keys, values in kept), bucket)

    def move(self, rows: Tensor, bucket: Bucket, *, tokens: int) -> None:
        """Keep the rows at ``rows`` (b,), and the first ``tokens`` tokens of each, in another bucket."""
        kept = self._views()
        self._fill(
            ((keys[rows, :, :tokens], values[rows, :, :tokens]) for keys, values in kept),
            bucket,
        )

    def layers(self) -> Cache:
        """Return the layers as a cache for the model."""
        return Cache(layers=[FixedLayer(keys, values, self.column) for keys, values in self._views()])

    def plain_layers(self, *, tokens: int, rows: int | None = None) -> list[DynamicLayer]:
        """Return the first tokens of the first rows (None: of all rows) as transformers' own layers, at the same addresses."""
        found = []
        for keys, values in self._views():
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[:rows, :, :tokens], values[:rows, :, :tokens]
            found.append(layer)
        return found

    def release(self) -> None:
        """Release all tensors."""
        self._held, self._capacity, self.bucket = [], 0, Bucket(0, 0)

    def _views(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (_view(keys, kind[0], self.bucket), _view(values, kind[1], self.bucket))
            for (keys, values), kind in zip(self._held, self._kinds, strict=True)
        ]

    def _fill(self, parts: Iterable[tuple[Tensor, Tensor]], bucket: Bucket) -> None:
        """Lay out copies of keys and values, layer by layer, so that only those of one layer are held twice."""
        grows = not self.fits(bucket)
        positions = bucket.rows * bucket.length
        for number, (part, kinds) in enumerate(zip(parts, self._kinds, strict=True)):
            if grows:
                keys, values = (_storage(kind, positions, self.device) for kind in kinds)
                if number < len(self._held):
                    self._held[number] = keys, values
                else:
                    self._held.append((keys, values))
                del keys, values
            for held, kind, new in zip(self._held[number], kinds, part, strict=True):
                view, tokens = _view(held, kind, bucket), new.shape[-2]
                view[:, :, :tokens] = new
                # Masked values are multiplied by 0, so they must be finite numbers
                view[:, :, tokens:].zero_()
        self.bucket = bucket
        self._capacity = positions if grows else self._capacity


@dataclass(frozen=True)
class _Kind:
    """Shape and type of the keys, or of the values, of a layer."""

    heads: int
    width: int
    dtype: torch.dtype


def tensors_of(layer: object) -> tuple[Tensor, Tensor]:
    """Return keys and values of a layer that has been filled."""
    assert isinstance(layer, DynamicLayer)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def _kind(tensor: Tensor, dtype: torch.dtype | None) -> _Kind:
    return _Kind(tensor.shape[1], tensor.shape[3], dtype or tensor.dtype)


def _storage(kind: _Kind, positions: int, device: torch.device) -> Tensor:
    return torch.empty(positions * kind.heads * kind.width, dtype=kind.dtype, device=device)


def _view(held: Tensor, kind: _Kind, bucket: Bucket) -> Tensor:
    shape: Sequence[int] = (bucket.rows, kind.heads, bucket.length, kind.width)
    return held[: math.prod(shape)].view(shape)
