"""Tables of training data as pandera schemas, and the usable rows of a table.

The schemas check the rules of ``vantage.schemas.row_rules``, and every batch from ``usable_rows`` has passed them.
"""

from collections.abc import Callable, Iterable, Iterator

import pandera.pyarrow as pandera
import pyarrow as pa
import pyarrow.compute as pc
from pandera.api.pyarrow.types import PyArrowData

from vantage.schemas.row_rules import (
    COLUMN_TYPES,
    FAULT,
    MAY_LACK,
    SHOWN_ROWS,
    SLICE_ROWS,
    SOURCE_ROW,
    Mask,
    Report,
    RowCheck,
    Rule,
    UnusableTable,
    known_columns,
    rules,
)
from vantage.schemas.steps import CONTENT_COLUMNS, OPTIONAL_COLUMNS


def _schema(content: str) -> pandera.DataFrameSchema:
    may_lack = MAY_LACK.get(content, ())
    columns = {
        # A margin or an answer may be missing in some rows, or its whole column may be
        column: pandera.Column(
            COLUMN_TYPES[column],
            required=column not in may_lack,
            nullable=column in OPTIONAL_COLUMNS.get(content, ()),
        )
        for column in known_columns(content)
    }
    # n_failure_cases: a million bad rows would make a message of megabytes.
    checks = [
        pandera.Check(_passes(rule), name=rule.reason, n_failure_cases=SHOWN_ROWS, ignore_na=False)
        for rule in rules(content)
    ]
    return pandera.DataFrameSchema(columns, checks=checks, strict=False, name=content)


def _passes(rule: Rule) -> Callable[[PyArrowData], Mask]:
    return lambda data: pc.invert(rule.broken(data.table))


SCHEMAS: dict[str, pandera.DataFrameSchema] = {content: _schema(content) for content in CONTENT_COLUMNS}
"""Content → pandera schema. It does not check repeats, which may be in different batches."""


# -- separating what can be used


def usable_rows(
    batches: Iterable[pa.RecordBatch | pa.Table], *, content: str, allow_repeats: bool = False
) -> tuple[Iterator[pa.RecordBatch], Callable[[], Report]]:
    """Return the usable rows, batch by batch, and a function that returns the report after the last batch.

    Args:
        batches: Columns as in ``CONTENT_COLUMNS``; optional are ``split``, ``margin`` and ``subgroup`` (preferences), ``answer``
            (prompts), ``messages`` (of prompts that are a conversation) and ``fault``, which is removed. Other columns
            are kept.
        content: Content of the rows.
        allow_repeats: Keep rows that are equal in all required columns; otherwise only the first of them is kept.

    Raises:
        UnusableTable: from the iterator: a column is missing or of another type, or there is no usable row.
    """
    check = RowCheck(content, allow_repeats=allow_repeats)
    return _kept(batches, content, check), check.report


def _slices(batches: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[pa.RecordBatch | pa.Table]:
    for batch in batches:
        for start in range(0, batch.num_rows, SLICE_ROWS):
            yield batch.slice(start, SLICE_ROWS)


def _kept(
    batches: Iterable[pa.RecordBatch | pa.Table], content: str, check: RowCheck
) -> Iterator[pa.RecordBatch]:
    num_rows = num_kept = 0
    for part in _slices(batches):
        table, usable = check.check(part)
        kept = table.filter(pa.array(usable, pa.bool_()))
        kept = kept.drop_columns([column for column in (FAULT, SOURCE_ROW) if column in kept.column_names])
        if kept.num_rows:
            SCHEMAS[content].validate(kept, lazy=True)
            yield from kept.combine_chunks().to_batches()
        num_rows, num_kept = num_rows + table.num_rows, num_kept + kept.num_rows
    if not num_rows:
        raise UnusableTable(f"{content}: there are no rows; an empty file cannot be trained on")
    if not num_kept:
        raise UnusableTable(str(check.report()))
