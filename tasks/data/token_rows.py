"""Keep token ids and texts of many rows in little memory: in a file that the system may drop from memory, and 8 bytes a row."""

import json
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

_IN_MEMORY = 1 << 26
"""Bytes from which on rows are kept in a file."""


class TokenRows(Sequence[list[int]]):
    """Rows of integers, read from the file; a row is returned as a list."""

    def __init__(self, values: Any, ends: Any) -> None:
        """
        Args:
            values: (N,) integers, the rows one after the other.
            ends: (R,) int64, where each row ends.
        """
        self._values, self._ends = values, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        values: list[int] = self.array(index).tolist()
        return values

    def array(self, index: int) -> Any:
        """Return one row, (L,)."""
        row = range(len(self))[index]  # raises IndexError
        return self._values[self._ends[row - 1] if row else 0 : self._ends[row]]

    def lengths(self) -> Any:
        """Return the lengths, (R,) int64."""
        return np.diff(self._ends, prepend=0)


class GroupedRows(Sequence[list[list[int]]]):
    """Groups of rows, read from the file; a group is returned as a list of rows."""

    def __init__(self, rows: TokenRows, sizes: Any) -> None:
        """
        Args:
            rows: the rows of all groups, group by group.
            sizes: (G,) rows of each group.
        """
        self._rows, self._ends = rows, np.cumsum(sizes)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> list[list[int]]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[list[int]]]: ...
    def __getitem__(self, index: int | slice) -> list[list[int]] | list[list[list[int]]]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        group = range(len(self))[index]  # raises IndexError
        return self._rows[self._ends[group - 1] if group else 0 : self._ends[group]]


class TokenRowsWriter:
    """Receives rows one after the other."""

    def __init__(self, folder: Path | None, *, typecode: Literal["i", "B"] = "i") -> None:
        """
        Args:
            folder: takes the file, which has no name there; None: the rows stay in memory.
            typecode: of an integer, as in ``array``: 32 bits, or a byte.
        """
        self._folder, self._typecode = folder, typecode
        self._waiting, self._ends = array(typecode), array("q")
        self._file: Any = None
        self._num_values = 0

    def extend(self, rows: Iterable[Sequence[int]]) -> None:
        """Add rows."""
        for row in rows:
            self._waiting.extend(row)
            self._num_values += len(row)
            self._ends.append(self._num_values)
        if self._folder is not None and len(self._waiting) * self._waiting.itemsize >= _IN_MEMORY:
            self._write()

    def rows(self) -> TokenRows:
        """Return all rows; nothing may be added afterwards."""
        ends = np.frombuffer(self._ends, dtype=np.int64) if self._ends else np.zeros(0, dtype=np.int64)
        kind = np.dtype(self._typecode)
        if self._file is None:
            values = np.frombuffer(self._waiting, dtype=kind) if self._waiting else np.zeros(0, kind)
            return TokenRows(values, ends)
        self._write()
        self._file.flush()
        return TokenRows(np.memmap(self._file, dtype=kind, mode="r"), ends)

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (lives as long as the rows)
        self._waiting.tofile(self._file)
        self._waiting = array(self._typecode)


class JsonRows(Sequence[Any]):
    """Texts, or other JSON values, read from the file; each is decoded at every read."""

    def __init__(self, rows: TokenRows) -> None:
        """
        Args:
            rows: the bytes of each value.
        """
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        return json.loads(self._rows.array(index).tobytes())


class JsonRowsWriter:
    """Receives texts, or other JSON values, one after the other."""

    def __init__(self, folder: Path | None) -> None:
        """
        Args:
            folder: as in ``TokenRowsWriter``.
        """
        self._rows = TokenRowsWriter(folder, typecode="B")

    def extend(self, values: Iterable[Any]) -> None:
        """Add values."""
        # An array extends another at once, and bytes would extend it one by one
        self._rows.extend(array("B", json.dumps(value, ensure_ascii=False).encode()) for value in values)

    def rows(self) -> JsonRows:
        """Return all values; nothing may be added afterwards."""
        return JsonRows(self._rows.rows())
