"""Rows of a prepared dataset: Parquet files, one a split."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def write_rows(folder: Path, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one split; the same rows make the same bytes (with the same version of pyarrow)."""
    pq.write_table(
        pa.Table.from_pylist(list(map(dict, rows))), folder / f"{split}.parquet", compression="zstd"
    )


def read_rows(folder: Path, split: str) -> list[Row]:
    """All rows of one split of a ``Dataset`` artifact."""
    rows: list[Row] = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return rows


def count_missing(folder: Path, split: str, column: str) -> tuple[int, int]:
    """In how many rows of one split the column holds nothing (in all, where there is no such column); and how many rows there are."""
    with pq.ParquetFile(folder / f"{split}.parquet") as file:
        num_rows = file.metadata.num_rows
        if column not in file.schema_arrow.names:
            return num_rows, num_rows
        return file.read(columns=[column])[column].null_count, num_rows
