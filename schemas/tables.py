"""What rows of text must be like to train on: pandera schemas, and a row-level report of what is not.

A table is read in Arrow batches, so that memory holds one batch and a 16-byte hash for each row kept. The rules
are Arrow masks, because a mask says which rows to drop; pandera holds the same rules as checks, and every batch
that leaves ``usable`` has passed them.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pandera.pyarrow as pandera
import pyarrow as pa
import pyarrow.compute as pc
from pandera.api.pyarrow.types import PyArrowData

from schemas.references import CONTENT_COLUMNS

Mask: TypeAlias = Any
"""``pyarrow.ChunkedArray`` of booleans, one for each row, True where the row breaks a rule."""

TEXT_COLUMNS: dict[str, tuple[str, ...]] = {
    **CONTENT_COLUMNS,
    "rollouts": ("prompt", "response"),
}
"""The columns that rows of each content have, and that tell two rows apart."""

SPLITS = ("train", "validation", "test")
REPEATED = "repeats an earlier row"
"""The reason given for a row that equals one before it in all its text columns."""
SLICE_ROWS = 10_000
"""Rows looked at together: what bounds memory."""
SHOWN_ROWS = 10
_SHOWN_CHARACTERS = 60


class UnusableTable(ValueError):
    """A table of which no row can be used: columns missing, of another type, or no rows at all."""


@dataclass(frozen=True)
class Rule:
    """One thing that may be wrong with a row."""

    reason: str
    """``prompt is empty``: the count's name in a report."""
    column: str
    broken: Callable[[pa.Table], Mask]


@dataclass(frozen=True)
class BadRow:
    """A row that is left out."""

    row: int
    """From 0, in the order of the input."""
    column: str
    reason: str
    value: str
    """The first characters of what stands in the column."""

    def __str__(self) -> str:
        return f"row {self.row}: {self.reason}: {self.value}"


@dataclass(frozen=True)
class Report:
    """What was found in a table. A row that breaks several rules is counted under the first."""

    content: str
    num_rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason → number of rows."""
    first: tuple[BadRow, ...] = ()
    """The first bad rows, ten at most."""

    @property
    def num_dropped(self) -> int:
        """Rows that cannot be used."""
        return sum(self.dropped.values())

    @property
    def dropped_share(self) -> float:
        """The same as a share of all rows."""
        return self.num_dropped / self.num_rows

    def __str__(self) -> str:
        counts = "".join(f"\n  {count} x {reason}" for reason, count in self.dropped.items())
        shown = "".join(f"\n  {row}" for row in self.first)
        head = f"{self.content}: {self.num_dropped} of {self.num_rows} rows are unusable"
        return head + (f"{counts}\nThe first of them:{shown}" if self.first else "")


# -- rules


def rules(content: str) -> tuple[Rule, ...]:
    """What every row must keep, in the order in which reasons are given; repeats are looked for after these."""
    texts = TEXT_COLUMNS[content]
    found = [Rule(f"{column} is missing", column, _null(column)) for column in texts]
    found += [Rule(f"{column} is empty", column, _empty(column)) for column in texts]
    found += [Rule(f"{column} holds a NUL byte", column, _nul(column)) for column in texts]
    if content == "preferences":
        found.append(Rule("chosen equals rejected", "chosen", _equal("chosen", "rejected")))
    if content == "rollouts":
        found.append(Rule("score is missing or not finite", "score", _not_finite("score")))
        found.append(Rule("num_tokens is below 1", "num_tokens", _below_one("num_tokens")))
    else:
        found.append(Rule(f"split is none of {', '.join(SPLITS)}", "split", _unknown_split))
    return tuple(found)


def _null(column: str) -> Callable[[pa.Table], Mask]:
    return lambda table: pc.is_null(table[column])


def _empty(column: str) -> Callable[[pa.Table], Mask]:
    return lambda table: pc.fill_null(pc.equal(pc.utf8_trim_whitespace(table[column]), ""), False)


def _nul(column: str) -> Callable[[pa.Table], Mask]:
    return lambda table: pc.fill_null(pc.match_substring(table[column], "\0"), False)


def _equal(one: str, other: str) -> Callable[[pa.Table], Mask]:
    return lambda table: pc.fill_null(pc.equal(table[one], table[other]), False)


def _not_finite(column: str) -> Callable[[pa.Table], Mask]:
    return lambda table: pc.invert(pc.fill_null(pc.is_finite(table[column]), False))


def _below_one(column: str) -> Callable[[pa.Table], Mask]:
    return lambda table: pc.fill_null(pc.less(table[column], 1), True)


def _unknown_split(table: pa.Table) -> Mask:
    if "split" not in table.column_names:
        return pa.chunked_array([pa.array([False] * table.num_rows, pa.bool_())])
    return pc.invert(pc.is_in(table["split"], pa.array(SPLITS)))


# -- schemas


def _columns(content: str) -> dict[str, pa.DataType]:
    """Every column that is looked at, with its type; ``split`` may be missing."""
    texts = {column: pa.string() for column in TEXT_COLUMNS[content]}
    if content == "rollouts":
        return {**texts, "score": pa.float64(), "num_tokens": pa.int64()}
    return {**texts, "split": pa.string()}


def _schema(content: str) -> pandera.DataFrameSchema:
    columns = {
        column: pandera.Column(dtype, required=column != "split")
        for column, dtype in _columns(content).items()
    }
    # n_failure_cases: a million bad rows would make a message of megabytes.
    checks = [
        pandera.Check(_keeps(rule), name=rule.reason, n_failure_cases=SHOWN_ROWS, ignore_na=False)
        for rule in rules(content)
    ]
    return pandera.DataFrameSchema(columns, checks=checks, strict=False, name=content)


def _keeps(rule: Rule) -> Callable[[PyArrowData], Mask]:
    return lambda data: pc.invert(rule.broken(data.table))


SCHEMAS: dict[str, pandera.DataFrameSchema] = {content: _schema(content) for content in TEXT_COLUMNS}
"""Content → pandera schema. It does not look for repeats: those may lie in different batches."""


# -- separating what can be used


def usable(
    batches: Iterable[pa.RecordBatch | pa.Table], *, content: str, allow_repeats: bool = False
) -> tuple[Iterator[pa.RecordBatch], Callable[[], Report]]:
    """The rows that can be used, batch by batch, and a function that gives the report once all were taken.

    Args:
        batches: Columns as in ``TEXT_COLUMNS``, optionally ``split`` (of rollouts: ``score`` and ``num_tokens``);
            other columns pass through.
        content: What the rows are.
        allow_repeats: Keep rows that are equal in all text columns; otherwise the first of them is kept.
            Rollouts may always repeat: two samples of one prompt can be the same.

    Raises:
        UnusableTable: from the iterator: a column is missing or of another type, there is no row, or none can
            be used.
    """
    tally = _tally(content, allow_repeats)
    return _kept(batches, tally), tally.report


def validate(
    table: pa.Table | Iterable[pa.RecordBatch | pa.Table], content: str, *, allow_repeats: bool = False
) -> Report:
    """Look at every row and keep none: the report that ``usable`` would give.

    Raises:
        UnusableTable: a column is missing or of another type, or there is no row.
    """
    tally = _tally(content, allow_repeats)
    for part in _slices([table] if isinstance(table, pa.Table) else table):
        tally.keep(part)
    tally.refuse_no_rows()
    return tally.report()


def _tally(content: str, allow_repeats: bool) -> "_Tally":
    return _Tally(content, seen=None if allow_repeats or content == "rollouts" else set())


def _slices(batches: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[pa.RecordBatch | pa.Table]:
    for batch in batches:
        for start in range(0, batch.num_rows, SLICE_ROWS):
            yield batch.slice(start, SLICE_ROWS)


def _kept(batches: Iterable[pa.RecordBatch | pa.Table], tally: "_Tally") -> Iterator[pa.RecordBatch]:
    num_kept = 0
    for part in _slices(batches):
        kept = tally.keep(part)
        if kept.num_rows:
            SCHEMAS[tally.content].validate(kept, lazy=True)
            num_kept += kept.num_rows
            yield from kept.combine_chunks().to_batches()
    tally.refuse_no_rows()
    if not num_kept:
        raise UnusableTable(str(tally.report()))


@dataclass
class _Tally:
    """What was counted so far; the one thing here that changes."""

    content: str
    seen: set[bytes] | None
    num_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: list[BadRow] = field(default_factory=list)

    def report(self) -> Report:
        return Report(self.content, self.num_rows, dict(self.dropped), tuple(self.first))

    def refuse_no_rows(self) -> None:
        if not self.num_rows:
            raise UnusableTable(f"{self.content}: there are no rows; an empty file cannot be trained on")

    def keep(self, batch: pa.RecordBatch | pa.Table) -> pa.Table:
        """The batch's usable rows; the others are counted."""
        table = _typed(batch, self.content)
        broken = [(rule.reason, rule.column, rule.broken(table).to_pylist()) for rule in rules(self.content)]
        keys = [table[column].to_pylist() for column in TEXT_COLUMNS[self.content]]
        keep = []
        for i in range(table.num_rows):
            why = next(((reason, column) for reason, column, mask in broken if mask[i]), None)
            if why is None and self.seen is not None and self._is_repeat([column[i] for column in keys]):
                why = (REPEATED, "prompt")
            if why is not None:
                self._count(self.num_rows + i, *why, table, i)
            keep.append(why is None)
        self.num_rows += table.num_rows
        return table.filter(pa.array(keep, pa.bool_()))

    def _is_repeat(self, texts: list[str]) -> bool:
        assert self.seen is not None
        digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=16).digest()
        if digest in self.seen:
            return True
        self.seen.add(digest)
        return False

    def _count(self, row: int, reason: str, column: str, table: pa.Table, i: int) -> None:
        self.dropped[reason] += 1
        if len(self.first) < SHOWN_ROWS:
            self.first.append(BadRow(row, column, reason, _shown(table[column][i].as_py())))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _typed(batch: pa.RecordBatch | pa.Table, content: str) -> pa.Table:
    """The batch with its columns in the schema's types; files hold large and dictionary-encoded strings too."""
    table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
    missing = [name for name in _columns(content) if name not in (*table.column_names, "split")]
    if missing:
        there = ", ".join(table.column_names)
        raise UnusableTable(f"{content}: there is no column {', '.join(missing)}; there are: {there}")
    for position, column in enumerate(table.column_names):
        wanted = _columns(content).get(column)
        if wanted is None:
            continue
        found = table.schema.field(column).type
        if not _fits(found, wanted):
            kind = "text" if wanted == pa.string() else "numbers"
            raise UnusableTable(f"{content}: column {column} is {found}, not {kind}; name a column of {kind}")
        table = table.set_column(position, column, table[column].cast(wanted))
    return table


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_dictionary(found):
        return _fits(found.value_type, wanted)
    if pa.types.is_null(found):
        return True
    if wanted == pa.string():
        return bool(
            pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found)
        )
    return bool(pa.types.is_integer(found) or (pa.types.is_floating(found) and wanted == pa.float64()))
