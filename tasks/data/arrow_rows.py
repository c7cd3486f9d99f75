"""Read rows of Parquet and Arrow files, one batch in memory at a time."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from vantage.tasks.data.row_faults import Fault, SourceRow, UnreadableFile, shown
from vantage.tasks.data.rows import open_parquet

_BATCH_ROWS = 1000
_ROWS_A_BYTE = 1000
_ALWAYS_ROWS = 1 << 17
"""Most rows of a file of any size."""
_ARROW_FILE = b"ARROW1"
_OF_A_VALUE = ("UTF8", "precision", "acceptable range", "whole number of days")
"""Words in the errors of Arrow's validation about one value. All other errors concern the positions of values."""
WRITE_AGAIN = "write it again, or fetch another copy"
"""The remedy for a damaged file."""
_DAMAGED = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, TypeError)
"""The errors that pyarrow raises for wrong bytes."""


def parquet_rows(source: Path | BinaryIO) -> Iterator[SourceRow]:
    """Yield the rows of a local or remote file."""
    # Threads of Arrow that still wait for reads in Python when the process is done abort it
    is_here = isinstance(source, Path)
    with _damage_explained(), open_parquet(source) as file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise UnreadableFile("two of its columns have one name; rename one")
        possible = _PossibleRows(source.stat().st_size if isinstance(source, Path) else _size(source))
        for batch in file.iter_batches(_BATCH_ROWS, use_threads=is_here):
            possible.take(batch.num_rows)
            yield from rows_of_batch(batch)


def arrow_rows(opened: Callable[[], Any]) -> Iterator[SourceRow]:
    """Yield the rows of a file, or of a stream, in the format of ``datasets``."""
    with _damage_explained(), opened() as file:
        is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        if len(set(reader.schema.names)) < len(reader.schema.names):
            raise UnreadableFile("two of its columns have one name; rename one")
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        possible = _PossibleRows(file.size())
        for batch in batches:
            possible.take(batch.num_rows)
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield from rows_of_batch(batch.slice(start, _BATCH_ROWS))


@contextmanager
def _damage_explained() -> Iterator[None]:
    """Raise UnreadableFile, with the remedy, for pyarrow's errors in the block about the file's bytes."""
    try:
        yield
    except UnreadableFile:
        raise
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk is at fault, not the content of the file
        raise UnreadableFile(f"{_reason(error)}; {WRITE_AGAIN}") from error


def _size(file: BinaryIO) -> int:
    place = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(place)
    return size


class _PossibleRows:
    """Counts the rows that are read. Rows may take no bytes, so those of a wrongly declared number would never end."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._left = max(_ALWAYS_ROWS, _ROWS_A_BYTE * num_bytes)

    def take(self, num_rows: int) -> None:
        """Count rows that are read.

        Raises:
            UnreadableFile: there are more rows than a file of this size can hold.
        """
        self._left -= num_rows
        if self._left < 0:
            raise UnreadableFile(
                f"it declares more rows than fit into its {self._num_bytes:,} bytes ({_ROWS_A_BYTE:,} a byte); {WRITE_AGAIN}"
            )


def _reason(error: Exception) -> str:
    """Return the meaning of a library's error, in a line."""
    if isinstance(error, UnicodeDecodeError):
        return "the name of a column, or the description of one, is not UTF-8"
    return (str(error).splitlines() or [type(error).__name__])[0]


def rows_of_batch(batch: pa.RecordBatch) -> Iterator[SourceRow]:
    """Yield the rows of a batch. A value that cannot be read costs only its row, and one in a column's dictionary the rows that
    use it.

    Raises:
        pa.ArrowInvalid: an offset or an index leads out of the data, so that any text may be another row's.
    """
    try:
        # otherwise a wrong offset, which Arrow does not check, would crash the process
        batch.validate(full=True)
        yield from batch.to_pylist(maps_as_pydicts="strict")
    # Causes: a key that is twice in a map, text that is no UTF-8, a date beyond Python's range
    except (ValueError, KeyError, OverflowError):
        batch = _without_dictionaries(batch)
        for number in range(batch.num_rows):
            one = batch.slice(number, 1)
            try:
                one.validate(full=True)
                [row] = one.to_pylist(maps_as_pydicts="strict")
            except (ValueError, KeyError, OverflowError) as error:
                if isinstance(error, pa.ArrowInvalid) and not any(each in str(error) for each in _OF_A_VALUE):
                    raise
                row = Fault("a value that cannot be read", shown(str(error)))
            yield row


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with a value for each row in place of indices into a dictionary, so that each row is validated alone.

    Arrow validates the dictionary of a slice as a whole. Text is taken as bytes here, and is text again for each row. A
    dictionary of other values, or within a list, stays: one bad value in it costs the batch.

    Raises:
        pa.ArrowException: an index or an offset leads out of the data.
    """
    columns = [
        _decoded(column) if pa.types.is_dictionary(column.type) else column for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _decoded(column: pa.DictionaryArray) -> pa.Array:
    values = column.dictionary
    bytes_type = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(values.type)
    if bytes_type is None and not (pa.types.is_primitive(values.type) or pa.types.is_decimal(values.type)):
        return column
    raw = values if bytes_type is None else values.view(bytes_type)
    raw.validate(full=bytes_type is not None)  # values of bytes can only be wrong in their offsets
    column.indices.validate(full=True)
    decoded = pa.DictionaryArray.from_arrays(column.indices, raw).dictionary_decode()
    return decoded if bytes_type is None else decoded.view(values.type)
