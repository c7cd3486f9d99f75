"""Read and write rows of a prepared dataset: Parquet files, one per split."""

from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from vantage.tasks.data.splits import SPLITS

if TYPE_CHECKING:
    from datasets import DatasetDict

Row = dict[str, Any]

ROW_GROUP = 1 << 17
"""Rows of a Parquet file that are compressed together, and held in memory while they are written."""

_BUFFER = 1 << 20
"""Bytes of a column that are read together."""


def write_rows(folder: Path, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one split; the same rows make the same bytes (with the same version of pyarrow)."""
    table = pa.Table.from_pylist(list(map(dict, rows)))
    pq.write_table(table, folder / f"{split}.parquet", compression="zstd", row_group_size=ROW_GROUP)


class SpooledRows:
    """Rows in a private file: memory holds only the batch that is read."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: an Arrow file, which is unlinked once it is open.
        """
        self._file = pa.OSFile(str(path))
        path.unlink()
        self.schema: pa.Schema = pa.ipc.open_file(self._file).schema

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows, of these columns."""
        fields = [self.schema.get_field_index(column) for column in columns]
        reader = pa.ipc.open_file(self._file, options=pa.ipc.IpcReadOptions(included_fields=fields))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number).select(list(columns))


def spool(batches: Iterable[pa.RecordBatch], path: Path) -> SpooledRows:
    """Write the batches, one at least, to a file."""
    writer = None
    try:
        for batch in batches:
            writer = writer or pa.ipc.new_file(path, batch.schema)
            writer.write_batch(batch)
    finally:
        if writer is not None:
            writer.close()
    return SpooledRows(path)


def write_marked(folder: Path, split: str, rows: SpooledRows, columns: Sequence[str], marks: Any) -> None:
    """Write the marked rows as one split, a row group at a time; the bytes are those of ``write_rows``.

    Args:
        columns: the columns that are written.
        marks: (N,) booleans.
    """
    schema = pa.schema([rows.schema.field(column) for column in columns], rows.schema.metadata)
    with pq.ParquetWriter(folder / f"{split}.parquet", schema, compression="zstd") as writer:
        for group in _row_groups(rows.batches(columns), marks):
            writer.write_table(group, row_group_size=ROW_GROUP)


def _row_groups(batches: Iterable[pa.RecordBatch], marks: Any) -> Iterator[pa.Table]:
    waiting: list[pa.Table] = []
    num_waiting = begin = 0
    for batch in batches:
        part = pa.Table.from_batches([batch]).filter(pa.array(marks[begin : begin + batch.num_rows]))
        begin += batch.num_rows
        while num_waiting + part.num_rows >= ROW_GROUP:
            room = ROW_GROUP - num_waiting
            yield pa.concat_tables([*waiting, part.slice(0, room)]).combine_chunks()
            part, waiting, num_waiting = part.slice(room), [], 0
        waiting.append(part)
        num_waiting += part.num_rows
    if num_waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def open_dataset(folder: Path | str) -> "DatasetDict":
    """Return a ``Dataset`` artifact as the library ``datasets`` has it: its splits by their names, with the types of its files.

    The rows are in memory. Nothing is written, also not into the library's cache.

    Args:
        folder: has one Parquet file a split, as data preparation and the stages that collect rows write them.

    Raises:
        FileNotFoundError: a split's file is missing.
    """
    from datasets import Dataset, DatasetDict  # takes a second, which stages need not wait for

    files = {split: Path(folder) / f"{split}.parquet" for split in SPLITS}
    missing = next((file.name for file in files.values() if not file.is_file()), None)
    if missing is not None:
        raise FileNotFoundError(
            f"{folder} has no {missing}; name the folder of a prepared dataset (objects/DIGEST of the store)"
        )
    return DatasetDict({split: Dataset(pq.read_table(file)) for split, file in files.items()})


def open_parquet(file: Path | BinaryIO) -> pq.ParquetFile:
    """Return a file that is read batch by batch: by default all of it would end up in memory, read ahead and never dropped."""
    return pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER)


def read_rows(folder: Path, split: str) -> list[Row]:
    """Return all rows of one split of a ``Dataset`` artifact."""
    rows: list[Row] = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return rows


def row_batches(folder: Path, split: str, size: int) -> Iterator[list[Row]]:
    """Yield the rows of one split, ``size`` at a time."""
    with open_parquet(folder / f"{split}.parquet") as file:
        for batch in file.iter_batches(size):
            yield batch.to_pylist()


def column_names(folder: Path, split: str) -> list[str]:
    """Return the columns of one split."""
    with pq.ParquetFile(folder / f"{split}.parquet") as file:
        names: list[str] = file.schema_arrow.names
        return names


def num_rows(folder: Path, split: str) -> int:
    """Return the number of rows in one split."""
    with pq.ParquetFile(folder / f"{split}.parquet") as file:
        return int(file.metadata.num_rows)


def count_missing(folder: Path, split: str, column: str) -> tuple[int, int]:
    """Return the number of rows of one split with an empty column (all, if there is no such column), and of all rows."""
    with pq.ParquetFile(folder / f"{split}.parquet") as file:
        num_rows = file.metadata.num_rows
        if column not in file.schema_arrow.names:
            return num_rows, num_rows
        return file.read(columns=[column])[column].null_count, num_rows
