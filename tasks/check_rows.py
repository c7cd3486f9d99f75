"""The implicit step before any training: read every row as training will read it.

Data is prepared without a tokenizer. Only with the model is it known whether the chat template accepts a row, and
whether the row fits the recipe's limits. This step finds that before hours of training, and not after them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vantage.schemas.recipe.work import CheckRows
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.steps import CONTENT_COLUMNS, checked_role
from vantage.tasks.data.encoding_counts import NOT_COUNTED, Encoded, encoding_metrics
from vantage.tasks.data.examples import (
    Codec,
    NothingLeft,
    codec_of,
    read_completions,
    read_prompts,
    read_rankings,
)
from vantage.tasks.data.rows import num_rows
from vantage.tasks.data.splits import SPLITS, TRAIN
from vantage.tasks.training.progress import Progress
from vantage.tasks.training.scratch import PROGRESS

REPORT = "report.json"


def run(job: StageJob[CheckRows]) -> StageResult:
    """Write ``report.json``: for each dataset, the number of unusable rows, and the first of them with the reason.

    Raises:
        TooManyLeftOut: more rows of a dataset cannot be used than its ``max_dropped`` allows.
        NothingLeft: no row can be used.
    """
    work, codec = job.work, codec_of(job, "model")
    progress = Progress(job.scratch / PROGRESS, total=len(work.datasets), phase="reading")
    found: dict[str, Any] = {}
    for place, (name, content) in enumerate(zip(work.datasets, work.contents, strict=True)):
        role = checked_role(place)
        folder = job.inputs[role]
        splits = list(read_splits(folder, content, codec))
        metrics = encoding_metrics(job, role, splits, name=f"data.{name}")
        counts = sum((split.counts for split in splits), NOT_COUNTED)
        found[name] = {
            "rows": counts.num_rows,
            "unusable": int(metrics["prompts_too_long"]) + counts.num_alike + counts.num_refused,
            "prompts_too_long": int(metrics["prompts_too_long"]),
            "alike_after_cut": counts.num_alike,
            "refused": counts.num_refused,
            "first_refused": list(counts.refused),
        }
        progress.update(place + 1)
    (job.output / REPORT).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return StageResult(
        metrics={
            "checked_rows": sum(each["rows"] for each in found.values()),
            "unusable_rows": sum(each["unusable"] for each in found.values()),
        }
    )


def read_splits(folder: Path, content: str, codec: Codec) -> Iterator[Encoded]:
    """Yield the splits that have rows, as ids; a held-out split without usable rows is left to the stage that reads it."""
    for split in SPLITS:
        if not num_rows(folder, split):
            continue
        try:
            yield read_as(content)(folder, split, codec)
        except NothingLeft:
            if split == TRAIN:
                raise


def read_as(content: str) -> Callable[[Path, str, Codec], Encoded]:
    """Return the function that reads a split of this content, as the stages do."""
    if content == "prompts":
        return read_prompts
    if content == "rankings":
        return read_rankings
    columns: Sequence[str] = [
        column for column in CONTENT_COLUMNS[content] if column not in ("prompt", "label")
    ]
    return lambda folder, split, codec: read_completions(folder, split, columns, codec)
