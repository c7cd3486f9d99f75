"""Rows of Parquet and Arrow files, of which memory holds one batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from vantage.tasks.data.row_faults import Fault, SourceRow, UnreadableFile, shown
from vantage.tasks.data.rows import open_parquet

_BATCH_ROWS = 1000
_ARROW_FILE = b"ARROW1"


def parquet_rows(source: Path | BinaryIO) -> Iterator[SourceRow]:
    """Yield the rows of a file, here or far away."""
    # Threads of Arrow that still wait for reads in Python when the process is done abort it
    is_here = isinstance(source, Path)
    try:
        with open_parquet(source) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise UnreadableFile("two of its columns have one name; rename one")
            for batch in file.iter_batches(_BATCH_ROWS, use_threads=is_here):
                yield from rows_of_batch(batch)
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile((str(error).splitlines() or [""])[0]) from error


def arrow_rows(opened: Callable[[], Any]) -> Iterator[SourceRow]:
    """Yield the rows of a file, or of a stream, as ``datasets`` keeps them."""
    try:
        with opened() as file:
            is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
            file.seek(0)
            reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            if len(set(reader.schema.names)) < len(reader.schema.names):
                raise UnreadableFile("two of its columns have one name; rename one")
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from rows_of_batch(batch.slice(start, _BATCH_ROWS))
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile((str(error).splitlines() or [""])[0]) from error


def rows_of_batch(batch: pa.RecordBatch) -> Iterator[SourceRow]:
    """Yield the rows of a batch. A value that cannot be read costs its row alone."""
    try:
        batch.validate(full=True)  # or a wrong offset, which Arrow does not look at, ends the process
        yield from batch.to_pylist(maps_as_pydicts="strict")
    # A key that stands twice in a map, text that is no UTF-8, a date beyond Python's
    except (ValueError, KeyError, OverflowError):
        for number in range(batch.num_rows):
            try:
                one = batch.slice(number, 1)
                one.validate(full=True)
                [row] = one.to_pylist(maps_as_pydicts="strict")
            except (ValueError, KeyError, OverflowError) as error:
                row = Fault("a value that cannot be read", shown(str(error)))
            yield row
