"""The implicit step before any training: map, validate, split and write one dataset of the recipe.

What it writes is all that later stages read, so neither they nor an audit depend on the user's file staying as it was.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.job import PrepareData, StageJob, StageResult
from schemas.recipe import Data
from schemas.references import CONTENT_COLUMNS, OPTIONAL_COLUMNS
from schemas.tables import COLUMN_TYPES, REPEATED, Report, usable
from tasks.data import arithmetic
from tasks.data.columns import map_row
from tasks.data.rows import Row, write_rows
from tasks.data.splits import SPLITS, TRAIN, assign_splits
from tasks.training.progress import Progress
from tasks.training.scratch import PROGRESS

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
SLICE_ROWS = 10_000

BUILTIN = "builtin:"
BUILTIN_SEED = 0
"""Built-in data is like a file: the same for every recipe and seed."""
BUILTIN_ROWS = 24_000
"""Rows of a built-in dataset where the recipe does not say how many; about four fifths are for training."""


class UnusableData(ValueError):
    """A dataset that cannot be trained on, with the reason and the rows that show it."""


def run(job: StageJob) -> StageResult:
    """Write ``train.parquet``, ``validation.parquet``, ``test.parquet`` and ``report.json`` into the output."""
    assert isinstance(job.work, PrepareData)
    content, data = job.work.content, job.work.data
    is_builtin = data.source.startswith(BUILTIN)
    progress = Progress(job.scratch / PROGRESS, total=3, phase="reading")

    # 1. Map the source's rows to our columns, and leave out what cannot be used
    batches = builtin_batches(data, content) if is_builtin else file_batches(data, content, cache=job.scratch)
    kept, report_of = usable(batches, content=content, allow_repeats=is_builtin)
    rows = [row for batch in kept for row in batch.to_pylist()]
    report = report_of()
    refuse_if_too_many_dropped(report, name=job.name, max_dropped=data.max_dropped)
    progress.update(1, phase="splitting")

    # 2. Set rows apart, by prompt
    by_split = split_rows(rows, data)
    progress.update(2, phase="writing")

    # 3. Write
    for side, side_rows in by_split.items():
        write_rows(job.output, side, side_rows)
    counts = {f"{side}_rows": len(side_rows) for side, side_rows in by_split.items()}
    (job.output / "report.json").write_text(
        json.dumps({**counts, "dropped": report.dropped}, indent=2) + "\n"
    )
    progress.update(3)
    return StageResult(metrics={**counts, "dropped_rows": report.num_dropped})


def builtin_batches(data: Data, content: str) -> Iterator[pa.Table]:
    """Rows of ``builtin:NAME/KIND``, which come with the side that each belongs to."""
    name, _, kind = data.source.removeprefix(BUILTIN).partition("/")
    dial = arithmetic.DIALS.get(name)
    count = data.rows or BUILTIN_ROWS
    rows: Iterator[Row]
    if dial is None:
        known = ", ".join(BUILTIN + name for name in arithmetic.DIALS)
        raise UnusableData(f"source={data.source!r} is not built in; there are {known}")
    if kind == "demonstrations":
        rows = arithmetic.demonstrations(seed=BUILTIN_SEED, count=count, dial=dial)
    elif kind == "preferences":
        rows = arithmetic.preferences(seed=BUILTIN_SEED, count=count, dial=dial)
    elif kind == "prompts":
        held_out = {side: number_of(getattr(data.split, side), count) for side in SPLITS if side != TRAIN}
        rows = arithmetic.prompts(seed=BUILTIN_SEED, train=count, **held_out, dial=dial)
    else:
        raise UnusableData(
            f"source={data.source!r} is not built in; {BUILTIN}{name} has demonstrations, preferences and prompts"
        )
    columns = (*CONTENT_COLUMNS[content], "split")
    yield pa.Table.from_pylist([{column: row[column] for column in columns} for row in rows])


def number_of(size: int | float, rows: int) -> int:
    """A split's number of rows, where it is given as a share of so many."""
    return size if isinstance(size, int) else max(1, round(size * rows))


def file_batches(data: Data, content: str, *, cache: Path) -> Iterator[pa.Table]:
    """Rows of the user's file in our columns, slice by slice; the file is read by ``datasets``.

    Raises:
        UnusableData: the file cannot be read as what its suffix says, or cannot hold such rows.
    """
    if content == "rankings" and Path(data.source).suffix.lower() == ".csv":
        raise UnusableData(
            f"source={data.source!r}: rankings are lists of responses and ranks, and a .csv file has no lists; "
            "convert it to .jsonl or .parquet"
        )
    file = open_file(data.source, cache=cache)
    columns: dict[str, str] = dict(data.columns) or own_columns(content, file.column_names)
    schema = pa.schema([(column, COLUMN_TYPES[column]) for column in columns])
    for batch in file.iter(batch_size=SLICE_ROWS):
        mapped = [map_row(row, columns) for row in batch.to_pylist()]
        yield pa.Table.from_pylist(mapped, schema=schema)


def own_columns(content: str, there: Sequence[str]) -> dict[str, str]:
    """The mapping of a file whose columns are called like ours: all that must be, and what may be and is."""
    optional = [column for column in OPTIONAL_COLUMNS.get(content, ()) if column in there]
    return {column: column for column in (*CONTENT_COLUMNS[content], *optional)}


def open_file(source: str, *, cache: Path) -> Any:
    """A ``datasets.Dataset`` over the file, memory-mapped, that gives Arrow tables.

    Raises:
        UnusableData: the file cannot be read as what its suffix says.
    """
    import datasets  # takes a second to import, and built-in data does not need it

    path = Path(source)
    if path.suffix.lower() not in FORMATS:
        raise UnusableData(
            f"source={source!r} has none of the suffixes {', '.join(FORMATS)}; rename or convert it"
        )
    if not path.is_file():
        raise UnusableData(f"source={source!r} is not a file here; check the path")
    if not path.stat().st_size:
        raise UnusableData(f"source={source!r} is empty")
    try:
        dataset = datasets.load_dataset(
            FORMATS[path.suffix.lower()],
            data_files=str(path),
            split="train",
            cache_dir=str(cache / "datasets"),
        )
    except (datasets.exceptions.DatasetGenerationError, ValueError, UnicodeDecodeError) as error:
        cause = error.__cause__ or error
        raise UnusableData(f"source={source!r} cannot be read as {path.suffix}: {cause}") from error
    return dataset.with_format("arrow")


def refuse_if_too_many_dropped(report: Report, *, name: str, max_dropped: float) -> None:
    """Refuse a dataset with more unusable rows than the recipe allows; repeated rows are left out without blame."""
    unusable = report.num_dropped - report.dropped.get(REPEATED, 0)
    if unusable <= max_dropped * report.num_rows:
        return
    reasons = ", ".join(
        f"{reason}: {count}" for reason, count in report.dropped.items() if reason != REPEATED
    )
    examples = "\n".join(f"  {row}" for row in report.first if row.reason != REPEATED)
    raise UnusableData(
        f"{name}: {unusable} of {report.num_rows} rows cannot be used ({reasons}), "
        f"more than max_dropped={max_dropped:g} allows; mend them, or raise max_dropped. The first:\n{examples}"
    )


def split_rows(rows: list[Row], data: Data) -> dict[str, list[Row]]:
    """Rows by side. A source that says itself where a row belongs is believed, and cut to the sizes asked for."""
    if "split" in rows[0]:
        sides = [row.pop("split") for row in rows]
    else:
        sides = assign_splits([row["prompt"] for row in rows], data.split)
    by_split: dict[str, list[Row]] = {side: [] for side in SPLITS}
    for row, side in zip(rows, sides, strict=True):
        by_split[side].append(row)
    limits = {TRAIN: data.rows, "validation": data.split.validation, "test": data.split.test}
    return {
        side: side_rows[:limit] if isinstance(limit := limits[side], int) else side_rows
        for side, side_rows in by_split.items()
    }
