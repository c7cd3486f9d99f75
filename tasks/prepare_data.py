"""The implicit step before any training: map, validate, split and write one dataset of the recipe.

Later stages read only the files that this step writes. So neither they nor an audit depend on the user's file.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vantage.schemas.recipe.inputs import Data
from vantage.schemas.recipe.sources import Builtin, HubDataset
from vantage.schemas.recipe.work import PrepareData
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.row_rules import SHOWN_ROWS, SLICE_ROWS, WITHOUT_BLAME, Report
from vantage.schemas.source_files import (
    PLAIN_FORMATS,
    check_unchanged,
    copy_hashed,
    data_format,
    data_limit,
    digest_of_files,
)
from vantage.schemas.steps import CONTENT_COLUMNS
from vantage.schemas.tables import usable_rows
from vantage.tasks.data import arithmetic
from vantage.tasks.data.contamination import (
    ASKED_COLUMNS,
    asked_text,
    contaminated,
    held_out_elsewhere,
    positions_of,
)
from vantage.tasks.data.hub_datasets import load_rows
from vantage.tasks.data.hub_files import UnreachableHub, source_files
from vantage.tasks.data.near_duplicates import near_duplicates
from vantage.tasks.data.published_formats import Format
from vantage.tasks.data.row_faults import SourceRow, UnreadableFile
from vantage.tasks.data.row_reader import RowReader, reader_of
from vantage.tasks.data.rows import Row, SpooledRows, spool, write_marked
from vantage.tasks.data.saved_datasets import rows_of_files
from vantage.tasks.data.splits import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    side_of,
    size_of,
    split_alone,
    split_by_shares,
)
from vantage.tasks.training.progress import Progress
from vantage.tasks.training.scratch import PROGRESS

LEFT_OUT = {"contaminated": "contaminated", "near_duplicates": "near_duplicate"}
"""Key of ``report.json`` → the metric ``NAME_rows`` with the same number."""
BUILTIN_SEED = 0
"""Seed of the built-in data, which is like a file: the same for every recipe and seed."""


class UnusableData(ValueError):
    """A dataset cannot be trained on; the message contains the reason and the rows that show it."""


def run(job: StageJob[PrepareData]) -> StageResult:
    """Write ``train.parquet``, ``validation.parquet``, ``test.parquet`` and ``report.json`` into the output."""
    work = job.work
    content, data = work.content, work.data
    progress = Progress(job.scratch / PROGRESS, total=3, phase="reading")

    # 1. Map the source's rows to our columns, and leave out what cannot be used
    if isinstance(data.origin, Builtin):
        rows, report = keep_usable(builtin_batches(work), work, job.scratch)
        columns, found = rows.schema.names, None
    else:
        with read_file(data, content, job) as (reader, batches):
            rows, report = keep_usable(batches, work, job.scratch)
            absent, found = reader.absent(), reader.format
        columns = [column for column in rows.schema.names if column not in absent]
    refuse_if_too_many_dropped(report, name=job.name, max_dropped=data.max_dropped)
    progress.update(1, phase="splitting")

    # 2. Set rows apart, by prompt
    sides, left_out = set_apart(partial(asked_texts, rows, columns), job)
    progress.update(2, phase="writing")

    # 3. Write
    counts = write_splits(rows, columns, sides, job.output, train_rows=data.rows)
    (job.output / "report.json").write_text(
        json.dumps({**described(counts, report, found), **left_out}, indent=2) + "\n"
    )
    progress.update(3)
    return StageResult(
        metrics={
            **counts,
            "source_rows": report.num_rows,
            "dropped_rows": report.num_dropped,
            "repeated_rows": report.num_repeated,
            "unused_rows": len(sides) - sum(counts.values()),
            **{f"{name}_rows": left_out[key] for key, name in LEFT_OUT.items() if key in left_out},
        }
    )


def keep_usable(batches: Iterator[pa.Table], work: PrepareData, scratch: Path) -> tuple[SpooledRows, Report]:
    """Return the usable rows on disk, and a report of the others."""
    repeats = isinstance(work.data.origin, Builtin)
    kept, report_of = usable_rows(batches, content=work.content, allow_repeats=repeats)
    return spool(kept, scratch / "kept.arrow"), report_of()


def described(counts: dict[str, int], report: Report, found: Format | None) -> dict[str, Any]:
    """Return the content of ``report.json``; for the rows that were left out the first ones, with their number from 0 on.

    Args:
        found: the format of the file; reported if it was recognised.
    """
    first = [asdict(bad) for bad in report.first]
    is_recognised = found is not None and found.is_recognised
    return {
        **counts,
        "dropped": report.dropped,
        **({"first_dropped": first} if first else {}),
        **({"format": asdict(found)} if found is not None and is_recognised else {}),
    }


def builtin_batches(work: PrepareData) -> Iterator[pa.Table]:
    """Yield rows of ``builtin:NAME/KIND``."""
    data, shares = work.data, work.shares
    name, kind = (data.origin.name, data.origin.kind) if isinstance(data.origin, Builtin) else ("", None)
    dial = arithmetic.DIALS.get(name)
    count = data.rows or arithmetic.BUILTIN_ROWS
    rows: Iterator[Row]
    if dial is None:
        known = ", ".join(str(Builtin(name)) for name in arithmetic.DIALS)
        raise UnusableData(f"source={data.source!r} is not built in; there are {known}")
    if kind == "demonstrations":
        rows = arithmetic.demonstrations(seed=BUILTIN_SEED, count=count, dial=dial)
    elif kind == "preferences":
        rows = arithmetic.preferences(seed=BUILTIN_SEED, count=count, dial=dial)
    elif kind == "labelled_responses":
        rows = arithmetic.labelled_responses(seed=BUILTIN_SEED, count=count, dial=dial)
    elif kind == "prompts":
        rows = arithmetic.prompts(
            seed=BUILTIN_SEED,
            wanted={
                TRAIN: count,
                VALIDATION: number_of(size_of(data.split, shares, VALIDATION), count),
                TEST: number_of(size_of(data.split, shares, TEST), count),
            },
            shares={
                TRAIN: 1 - shares.validation - shares.test,
                VALIDATION: shares.validation,
                TEST: shares.test,
            },
            side_of=partial(side_of, shares=shares),
            dial=dial,
        )
    else:
        raise UnusableData(
            f"source={data.source!r} is not built in; {Builtin(name)} has demonstrations, preferences, "
            "labelled_responses and prompts"
        )
    columns = CONTENT_COLUMNS[work.content]
    yield pa.Table.from_pylist([{column: row[column] for column in columns} for row in rows])


def number_of(size: int | float, rows: int) -> int:
    """Return a split's number of rows; ``size`` is that number, or a share of ``rows``."""
    return size if isinstance(size, int) else max(1, round(size * rows))


@contextmanager
def read_file(data: Data, content: str, job: StageJob) -> Iterator[tuple[RowReader, Iterator[pa.Table]]]:
    """Yield the reader of the user's file, and its batches, from a copy that was made while it was hashed.

    Raises:
        UnusableData: the file cannot be read in the format of its name, or cannot hold such rows.
        MissingColumn: no row has the value that a column is mapped to.
        SourceChanged, SourceTooLarge: the file has changed since the run was planned, or is too large.
    """
    copies: list[Path] = []
    try:
        ending, every = opened_rows(data, content, job, copies)
        reader, rows = reader_of(data, content, every, ending=ending)
        yield reader, batches_of(reader, rows, job.scratch)
    except UnreadableFile as error:
        as_what = "" if isinstance(data.origin, HubDataset) else f" as {data_format(data.source)}"
        raise UnusableData(f"source={data.source!r} cannot be read{as_what}: {error}") from error
    except UnreachableHub as error:
        raise UnusableData(str(error)) from error
    finally:
        for copy in copies:
            copy.unlink(missing_ok=True)


def opened_rows(
    data: Data, content: str, job: StageJob, copies: list[Path]
) -> tuple[str, Iterator[SourceRow]]:
    """Return the format of the source and its rows; those of files are read from copies, which ``copies`` takes. Raises as ``read_file``."""
    if isinstance(data.origin, HubDataset):
        assert data.load is not None, "a rule of the recipe"
        loaded = load_rows(data.origin, data.load)
        refuse_rankings_of_csv(data, content, loaded.ending)
        return loaded.ending, loaded.rows
    ending = data_format(data.source)
    if ending is None:
        raise UnusableData(
            f"source={data.source!r} has none of the suffixes {', '.join(PLAIN_FORMATS)}; rename or convert it"
        )
    refuse_rankings_of_csv(data, content, ending)
    names = copy_sources(data.source, ending, job.scratch, copies, planned=job.source_sha256)
    return ending, rows_of_files(data.source, copies, ending, names=names)


def refuse_rankings_of_csv(data: Data, content: str, ending: str) -> None:
    """Refuse rankings in a file without lists.

    Raises:
        UnusableData: the content needs lists, which the format does not have.
    """
    if content == "rankings" and ending.startswith(".csv"):
        raise UnusableData(
            f"source={data.source!r}: rankings are lists of responses and ranks, and a .csv file has no lists; "
            "convert it to .jsonl or .parquet"
        )


def batches_of(reader: RowReader, rows: Iterator[SourceRow], scratch: Path) -> Iterator[pa.Table]:
    """Yield the reader's rows, ``SLICE_ROWS`` at a time; a row that cannot be read has the reason in ``fault``.

    Raises:
        MissingColumn: no row has the value that a column is mapped to.
    """
    made = reader.made(rows, scratch)
    while batch := list(islice(made, SLICE_ROWS)):
        yield reader.table(batch)
    reader.refuse_wrong_columns()


def copy_sources(
    source: str, ending: str, scratch: Path, copies: list[Path], *, planned: str | None
) -> list[str]:
    """Copy the files that the source names, compare the copies with the digest in the stage key, and return their
    names.

    Args:
        copies: takes the copies, also of those that were made before an error.
    """
    digests, files = [], source_files(source)
    for number, file in enumerate(files):
        if not file.is_file():
            raise UnusableData(f"source={source!r} is not a file here; check the path")
        copies.append(scratch / f"source-{number}{ending}")
        digests.append(copy_hashed(file, copies[-1], data_limit()))
    if not digests:
        raise UnusableData(f"source={source!r} matches no file here; check the pattern")
    check_unchanged(source, planned=planned, found=digest_of_files(digests))
    if not any(copy.stat().st_size for copy in copies):
        raise UnusableData(f"source={source!r} is empty")
    return [file.name for file in files]


def refuse_if_too_many_dropped(report: Report, *, name: str, max_dropped: float) -> None:
    """Refuse a dataset with more unusable rows than the recipe allows; repeats and ties do not count."""
    unusable = sum(count for reason, count in report.dropped.items() if reason not in WITHOUT_BLAME)
    if unusable <= max_dropped * report.num_rows:
        return
    reasons = ", ".join(
        f"{reason}: {count}" for reason, count in report.dropped.items() if reason not in WITHOUT_BLAME
    )
    examples = "\n".join(f"  {row}" for row in report.first if row.reason not in WITHOUT_BLAME)
    raise UnusableData(
        f"{name}: {unusable} of {report.num_rows} rows cannot be used ({reasons}), "
        f"more than max_dropped={max_dropped:g} allows; mend them, or raise max_dropped. The first:\n{examples}"
    )


def set_apart(
    texts: Callable[[], Iterable[str]], job: StageJob[PrepareData]
) -> tuple[list[str | None], dict[str, Any]]:
    """Return the side of every row, or None if it is left out; and the part of ``report.json`` about rows that leak.

    Raises:
        UnusableData: no row is left, or more near-duplicates are left out than the recipe allows.
    """
    positions = positions_of(texts())
    leaks = contaminated(positions, job)
    if len(leaks) and leaks.all():
        names = ", ".join(f"data.{name}" for name in job.work.test_sets)
        raise UnusableData(
            f"{job.name}: every prompt occurs in a test set ({names}), so that no row can be trained on; "
            "name another source"
        )
    sides = sides_of(positions, leaks, job.work)
    counts: dict[str, Any] = {}
    if job.work.test_sets:
        first = islice((text for text, leak in zip(texts(), leaks, strict=True) if leak), SHOWN_ROWS)
        counts = {"contaminated": int(leaks.sum()), "first_contaminated": list(first)}
    return sides, {**counts, **leave_out_near_duplicates(texts, sides, job)}


def sides_of(positions: Sequence[float], leaks: Any, work: PrepareData) -> list[str | None]:
    """Return the side of every row; None for a contaminated row, and for a held-out row beyond the required number.

    Args:
        positions: position of each row's prompt.
        leaks: (N,) booleans, whether a test set has the prompt.
    """
    if work.data.is_test_set:
        return [TEST] * len(positions)
    assign = split_alone if work.alone and not isinstance(work.data.origin, Builtin) else split_by_shares
    if not leaks.any():
        return list(assign(positions, work.data.split, work.shares))
    kept = array("d", (position for position, leak in zip(positions, leaks, strict=True) if not leak))
    assigned = iter(assign(kept, work.data.split, work.shares))
    return [None if leak else next(assigned) for leak in leaks]


def asked_texts(rows: SpooledRows, columns: Sequence[str]) -> Iterator[str]:
    """Yield the prompt of every row; for a conversation, the user's first message."""
    for batch in rows.batches([column for column in ASKED_COLUMNS if column in columns]):
        yield from map(asked_text, batch.to_pylist())


def leave_out_near_duplicates(
    texts: Callable[[], Iterable[str]], sides: list[str | None], job: StageJob[PrepareData]
) -> dict[str, Any]:
    """Leave out training rows whose prompt nearly equals a held-out one; returns their part of ``report.json``.

    Raises:
        UnusableData: there are more such rows than the recipe allows.
    """
    asked = job.work.data.near_duplicates
    if asked is None:
        return {}
    found = []
    for pair in near_duplicates(texts, sides, similarity=asked.similarity, elsewhere=held_out_elsewhere(job)):
        sides[pair.row] = None
        found.append(pair)
    num_train = sides.count(TRAIN) + len(found)
    first = [
        {field: value for field, value in asdict(pair).items() if value is not None}
        for pair in found[:SHOWN_ROWS]
    ]
    if len(found) > asked.max_dropped * num_train:
        examples = "\n".join(
            f"  {each['prompt']!r} is nearly {each['held_out']!r}"
            f"{' of data.' + each['held_out_of'] if 'held_out_of' in each else ''} ({each['similarity']:.3g})"
            for each in first
        )
        raise UnusableData(
            f"{job.name}: {len(found)} of {num_train} rows for training have a prompt that is nearly a held-out one, more than "
            f"near_duplicates.max_dropped={asked.max_dropped:g} allows. Where prompts share a long template, raise "
            f"near_duplicates.similarity={asked.similarity:g}, else raise max_dropped. The first:\n{examples}"
        )
    return {"near_duplicates": len(found), "first_near_duplicates": first}


def write_splits(
    rows: SpooledRows,
    columns: Sequence[str],
    sides: Sequence[str | None],
    output: Path,
    *,
    train_rows: int | None,
) -> dict[str, int]:
    """Write one file per side; returns the number of rows in each.

    Args:
        train_rows: the most rows for training; None: all.
    """
    counts = {}
    for side in SPLITS:
        chosen = np.fromiter((name == side for name in sides), dtype=np.bool_, count=len(sides))
        if side == TRAIN and train_rows is not None:
            chosen[np.flatnonzero(chosen)[train_rows:]] = False
        write_marked(output, side, rows, columns, chosen)
        counts[f"{side}_rows"] = int(chosen.sum())
    return counts
