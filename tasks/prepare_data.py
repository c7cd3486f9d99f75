"""The implicit step before any training: map, validate, split and write one dataset of the recipe.

What it writes is all that later stages read, so neither they nor an audit depend on the user's file staying as it was.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.job import PrepareData, StageJob, StageResult
from schemas.recipe import Data, Split
from schemas.tables import usable
from tasks import arithmetic
from tasks.columns import MissingColumn, map_row
from tasks.rows import write_rows
from tasks.splits import SPLITS, TRAIN, TooFewRows, assign_splits

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
COLUMNS = {
    "demonstrations": ("prompt", "response"),
    "preferences": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
}
BUILTIN_ROWS = 20_000
BUILTIN_SEED = 0
"""Built-in data is like a file: the same for every recipe and seed."""
SLICE_ROWS = 10_000


class UnusableData(ValueError):
    """A dataset that cannot be trained on, with the reason and the rows that show it."""


def run(job: StageJob) -> StageResult:
    """Write ``train.parquet``, ``validation.parquet``, ``test.parquet`` and ``report.json`` into the output."""
    assert isinstance(job.work, PrepareData)
    content, data = job.work.content, job.work.data

    # 1. Map the source's rows to our columns, 2. drop what cannot be used, by stated rules
    batches = builtin_batches(data, content) if data.source.startswith("builtin:") else file_batches(job)
    kept, report = usable(batches, content=content)
    rows = [row for batch in kept for row in batch.to_pylist()]
    dropped = sum(report().dropped.values())
    refuse_if_too_many(dropped, data=data, name=job.name, report=report())

    # 3. Split by prompt
    sides = [row.pop("split") for row in rows] if "split" in rows[0] else assign_splits([r["prompt"] for r in rows], data.split)
    by_split = {side: [row for row, at in zip(rows, sides, strict=True) if at == side] for side in SPLITS}

    # 4. Write
    for side, side_rows in by_split.items():
        write_rows(job.output, side, side_rows)
    counts = {f"{side}_rows": len(side_rows) for side, side_rows in by_split.items()}
    (job.output / "report.json").write_text(json.dumps({**counts, "dropped": report().dropped}, indent=2) + "\n")
    return StageResult(metrics={**counts, "dropped_rows": dropped})
