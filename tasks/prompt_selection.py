"""Select the training prompts whose pass rate in collected responses lies in a range.

A group-based method learns nothing from prompts that always or never pass; a curriculum trains on the others. All
held-out prompts stay.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vantage.algorithms.score_distribution import are_above
from vantage.schemas.recipe.prompt_selection import PromptSelection
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.rollouts import HEADER, RolloutsHeader
from vantage.tasks.data.examples import PASS_RATE
from vantage.tasks.data.rows import ROW_GROUP, num_rows, open_parquet
from vantage.tasks.data.splits import SPLITS, TRAIN, TooFewRows
from vantage.tasks.rewards.term_scores import refuse_unknown_score
from vantage.tasks.rollout.collected import split_file
from vantage.tasks.training.progress import Progress
from vantage.tasks.training.scratch import PROGRESS

log = logging.getLogger(__name__)

REPORT = "report.json"
_TENTHS = 10
_READ_ROWS = 1 << 14

Case = tuple[str, str | None]
"""A prompt, and its row's answer."""


@dataclass
class Passes:
    """Responses to one prompt that were counted; mutable."""

    passed: int = 0
    responses: int = 0

    @property
    def rate(self) -> float:
        """Share of the responses that passed."""
        return self.passed / self.responses


@dataclass(frozen=True)
class Counts:
    """Numbers of rows of the training split, by what was done with them."""

    kept: int
    too_easy: int
    too_hard: int
    never: int
    """Rows none of whose responses passed; they also count as too hard, or as kept if the range begins at 0."""
    always: int
    without_responses: int
    """Rows that the collection left out, since their prompt was too long."""
    by_tenth: tuple[int, ...]
    """Rows by pass rate: [0, 0.1), [0.1, 0.2) … [0.9, 1]."""
    mean: float | None
    """Mean pass rate over the rows with responses."""


def run(job: StageJob[PromptSelection]) -> StageResult:
    """Write ``train.parquet``, ``validation.parquet``, ``test.parquet`` and ``report.json`` into the output.

    Raises:
        TooFewRows: no prompt is in the range.
    """
    work = job.work
    progress = Progress(job.scratch / PROGRESS, total=len(SPLITS), phase="selecting")
    counted = count_passes(job.inputs["rollouts"], work, path=f"stages.{job.name}")
    rows: dict[str, int] = {}
    for done, split in enumerate(SPLITS, start=1):
        source, target = (folder / f"{split}.parquet" for folder in (job.inputs["prompts"], job.output))
        if split == TRAIN:
            counts = select(source, target, counted, work)
            rows[split] = counts.kept
        else:
            target.write_bytes(source.read_bytes())
            rows[split] = num_rows(job.output, split)
        progress.update(done)
    found = {f"{split}_rows": rows[split] for split in SPLITS}
    counted_rows = {
        "rows_too_easy": counts.too_easy,
        "rows_too_hard": counts.too_hard,
        "rows_never_right": counts.never,
        "rows_always_right": counts.always,
    }
    report = {
        **found,
        "pass_rate": list(work.pass_rate),
        "passes_above": work.passes_above,
        **counted_rows,
        "rows_without_responses": counts.without_responses,
        "rows_by_tenth_of_pass_rate": list(counts.by_tenth),
        "mean_pass_rate": counts.mean,
    }
    (job.output / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return StageResult(metrics={**found, **counted_rows, "mean_pass_rate": counts.mean})


def count_passes(folder: Path, work: PromptSelection, *, path: str) -> dict[Case, Passes]:
    """Return prompt → its training responses and how many of them passed; memory holds one batch of responses at a time.

    Args:
        path: path of the stage in the recipe, for messages.

    Raises:
        UnknownScore: the score that decides what passes was not collected.
    """
    header = RolloutsHeader.model_validate_json((folder / HEADER).read_bytes())
    if work.term is not None:
        refuse_unknown_score(work.term, header.terms, path=f"{path}.term", of="the collected responses")
    column = "weighted_sum" if work.term is None else f"score.{work.term}"
    counted: dict[Case, Passes] = {}
    reader = pa.ipc.open_file(pa.memory_map(str(split_file(folder, TRAIN))))
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        columns = (batch.column(name).to_pylist() for name in ("prompt", "answer", column))
        prompts, answers, scores = columns
        passes = are_above(torch.tensor(scores, dtype=torch.float32), work.passes_above).tolist()
        for prompt, answer, has_passed in zip(prompts, answers, passes, strict=True):
            of_prompt = counted.setdefault((prompt, answer), Passes())
            of_prompt.responses += 1
            of_prompt.passed += has_passed
    return counted


def select(source: Path, target: Path, counted: Mapping[Case, Passes], work: PromptSelection) -> Counts:
    """Write the rows in the range, each with its pass rate; returns the counts of all.

    Raises:
        TooFewRows: no row is in the range.
    """
    low, high = work.pass_rate
    rates: list[float] = []
    without = kept = 0
    writer: pq.ParquetWriter | None = None
    for table, of_rows in _with_rates(source, counted):
        known = [rate for rate in of_rows if rate is not None]
        rates += known
        without += len(of_rows) - len(known)
        chosen = table.filter(pa.array([rate is not None and low <= rate <= high for rate in of_rows]))
        kept += chosen.num_rows
        writer = writer or pq.ParquetWriter(target, table.schema, compression="zstd")
        writer.write_table(chosen, row_group_size=ROW_GROUP)
    if writer is not None:
        writer.close()
    by_tenth = [0] * _TENTHS
    for rate in rates:
        by_tenth[min(int(rate * _TENTHS + 1e-9), _TENTHS - 1)] += 1
    counts = Counts(
        kept=kept,
        too_easy=sum(rate > high for rate in rates),
        too_hard=sum(rate < low for rate in rates),
        never=sum(rate == 0 for rate in rates),
        always=sum(rate == 1 for rate in rates),
        without_responses=without,
        by_tenth=tuple(by_tenth),
        mean=sum(rates) / len(rates) if rates else None,
    )
    log.info("%d rows kept, %d too easy, %d too hard", counts.kept, counts.too_easy, counts.too_hard)
    if not kept:
        raise TooFewRows(
            f"pass_rate=[{low:g}, {high:g}] keeps none of {len(rates) + without} prompts: {counts.too_easy} pass more often, "
            f"{counts.too_hard} less, and {without} have no response; widen pass_rate, or set passes_above"
        )
    return counts


def _with_rates(
    source: Path, counted: Mapping[Case, Passes]
) -> Iterator[tuple[pa.Table, list[float | None]]]:
    """Yield the rows, batch by batch, with the column of their pass rates, and these rates."""
    with open_parquet(source) as file:
        for batch in file.iter_batches(_READ_ROWS):
            table = pa.Table.from_batches([batch])
            answers: list[Any] = (
                table["answer"].to_pylist() if "answer" in table.column_names else [None] * table.num_rows
            )
            cases = zip(table["prompt"].to_pylist(), answers, strict=True)
            found = [counted.get(case) for case in cases]
            rates = [None if each is None else each.rate for each in found]
            if PASS_RATE in table.column_names:  # from an earlier selection of these prompts
                table = table.drop_columns(PASS_RATE)
            yield table.append_column(PASS_RATE, pa.array(rates, type=pa.float64())), rates
