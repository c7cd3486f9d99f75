"""The implicit step that mixes prepared datasets in given shares.

A prompt's hash decides its side in every dataset of a recipe, so what one part holds out no part trains on.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vantage.schemas.recipe.work import MixData
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.row_rules import known_columns
from vantage.schemas.steps import part_role
from vantage.tasks.data.rows import ROW_GROUP, open_parquet
from vantage.tasks.data.splits import SPLITS, TRAIN, TooFewRows
from vantage.tasks.training.progress import Progress
from vantage.tasks.training.scratch import PROGRESS

log = logging.getLogger(__name__)

_READ_ROWS = 1 << 14


def run(job: StageJob[MixData]) -> StageResult:
    """Write ``train.parquet``, ``validation.parquet``, ``test.parquet`` and ``report.json`` into the output."""
    work = job.work
    folders = [job.inputs[part_role(position)] for position in range(len(work.parts))]
    progress = Progress(job.scratch / PROGRESS, total=len(SPLITS), phase="mixing")
    metrics: dict[str, int] = {}
    parts: list[dict[str, Any]] = [{"weight": weight} for weight in work.weights]
    unused = again = 0
    for done, side in enumerate(SPLITS, start=1):
        # 1. Count the rows to take from each part
        sizes = [_num_rows(folder, side) for folder in folders]
        counts = counts_of(work, side, sizes)
        for name, part, size, count in zip(work.parts, parts, sizes, counts, strict=True):
            log.info("%s: %d rows of the %d in data.%s", side, count, size, name)
            part |= {f"{side}_rows": count, f"{side}_rows_there": size}
        unused += sum(max(0, size - count) for size, count in zip(sizes, counts, strict=True))
        again += sum(max(0, count - size) for size, count in zip(sizes, counts, strict=True))

        # 2. Choose the rows and their order
        streams = [
            _Stream(folder / f"{side}.parquet", size, count, f"{job.seed}:mix_data:{side}:{position}")
            for position, (folder, size, count) in enumerate(zip(folders, sizes, counts, strict=True))
        ]
        _write(job.output / f"{side}.parquet", streams, counts, work.content)
        metrics[f"{side}_rows"] = sum(counts)
        progress.update(done)
    report = {**metrics, "parts": parts}
    (job.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return StageResult(metrics={**metrics, "unused_rows": unused, "rows_again": again})


def counts_of(work: MixData, side: str, sizes: Sequence[int]) -> list[int]:
    """Return the number of rows to take from each part on one side; ``sizes`` are the numbers that the parts have.

    Raises:
        TooFewRows: a part has too few held-out rows, or so small a weight that none of its rows is trained on.
    """
    asked = work.rows if side == TRAIN else getattr(work.split, side)
    total = most_without_repeats(sizes, work.weights) if asked is None else asked
    counts = apportioned(total, work.weights)
    for name, weight, size, count in zip(work.parts, work.weights, sizes, counts, strict=True):
        if side == TRAIN and not count:
            raise TooFewRows(
                f"parts.{name}: a share of {weight:.3g} of {total} rows is no row; raise its weight, or give more data"
            )
        if side != TRAIN and count > size:
            most = most_without_repeats(sizes, work.weights)
            raise TooFewRows(
                f"split.{side}={asked} takes {count} rows of data.{name}, which holds out {size}; ask for {most} at most, "
                f"or hold out more of data.{name}"
            )
    return counts


def apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """Split ``total`` into whole numbers in proportion to the weights, by the largest-remainder method."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def most_without_repeats(sizes: Sequence[int], weights: Sequence[float]) -> int:
    """Return the largest total for which every part has enough rows."""
    total = int(min(size / weight for size, weight in zip(sizes, weights, strict=True))) + 1
    while any(count > size for count, size in zip(apportioned(total, weights), sizes, strict=True)):
        total -= 1
    return total


def part_order(counts: Sequence[int]) -> Any:
    """Return (N,): the part of each row of the mixture. Every range of rows has about the shares of the whole."""
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count])
    parts = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    return parts[np.argsort(places, kind="stable")]


@dataclass
class _Stream:
    """The chosen rows of one part, in the order of its file; if these are too few, they repeat from the beginning."""

    path: Path
    size: int
    count: int
    seed: str

    def tables(self, columns: Mapping[str, pa.DataType]) -> Iterator[pa.Table]:
        """Yield the rows, batch by batch, with these columns; columns that the part lacks are null."""
        rounds, rest = divmod(self.count, self.size)
        for mask in [*[np.ones(self.size, dtype=bool)] * rounds, *([self._some(rest)] if rest else [])]:
            begin = 0
            with open_parquet(self.path) as file:
                there = [column for column in columns if column in file.schema_arrow.names]
                for batch in file.iter_batches(_READ_ROWS, columns=there):
                    table = pa.Table.from_batches([batch])
                    chosen = pa.array(mask[begin : begin + batch.num_rows])
                    begin += batch.num_rows
                    yield _with_columns(table.filter(chosen), columns)

    def _some(self, number: int) -> Any:
        """Return a mask (size,) of random rows, from raw bits, whose stream numpy keeps from version to version."""
        seed = int.from_bytes(hashlib.sha256(self.seed.encode()).digest()[:8], "big")
        draws = np.random.PCG64(seed).random_raw(self.size)
        mask = np.zeros(self.size, dtype=bool)
        mask[np.argsort(draws, kind="stable")[:number]] = True
        return mask


def _with_columns(table: pa.Table, columns: Mapping[str, pa.DataType]) -> pa.Table:
    arrays = [
        table[column] if column in table.column_names else pa.nulls(table.num_rows, type=kind)
        for column, kind in columns.items()
    ]
    return pa.table(arrays, schema=pa.schema(list(columns.items())))


def _write(path: Path, streams: Sequence[_Stream], counts: Sequence[int], content: str) -> None:
    """Write one side, a row group at a time."""
    columns: dict[str, pa.DataType] = {}
    for stream in streams:
        found = pq.read_schema(stream.path)
        columns |= {name: found.field(name).type for name in found.names if name in known_columns(content)}
    order = part_order(counts)
    waiting = [_Waiting(stream.tables(columns)) for stream in streams]
    with pq.ParquetWriter(path, pa.schema(list(columns.items())), compression="zstd") as writer:
        for begin in range(0, len(order), ROW_GROUP):
            parts = order[begin : begin + ROW_GROUP]
            numbers = [int((parts == part).sum()) for part in range(len(streams))]
            taken = [each.take(number) for each, number in zip(waiting, numbers, strict=True)]
            places = np.empty(len(parts), dtype=np.int64)
            for part, first in enumerate(np.cumsum([0, *numbers[:-1]])):
                places[parts == part] = first + np.arange(numbers[part])
            whole = pa.concat_tables([table for tables in taken for table in tables]).combine_chunks()
            writer.write_table(whole.take(pa.array(places)), row_group_size=ROW_GROUP)


class _Waiting:
    """Rows of a stream that were read and not yet taken; mutable."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, number: int) -> list[pa.Table]:
        """Return the next ``number`` rows; the stream must have that many."""
        taken = []
        while number:
            table = next(self._tables) if self._rest is None else self._rest
            taken.append(table.slice(0, number))
            self._rest = table.slice(number) if table.num_rows > number else None
            number -= taken[-1].num_rows
        return taken


def _num_rows(folder: Path, side: str) -> int:
    with pq.ParquetFile(folder / f"{side}.parquet") as file:
        number: int = file.metadata.num_rows
        return number
