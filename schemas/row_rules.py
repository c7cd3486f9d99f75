"""Rules for rows of training data, and a report of the rows that break them.

``vantage data inspect`` and the preparation of data both use them, so a row that one counts as usable is kept by the other.
A table is checked in Arrow batches; memory holds one batch, and about 20 bytes for each usable row to find repeats. The
rules are Arrow masks, because a mask shows which rows break a rule. ``vantage.schemas.tables`` makes pandera schemas of
them; stages run without pandera.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from vantage.schemas.digest_set import DigestSet
from vantage.schemas.steps import CONTENT_COLUMNS, MADE_COLUMNS, OPTIONAL_COLUMNS

Mask: TypeAlias = Any
"""``pyarrow.ChunkedArray`` of booleans, one a row, True if the row breaks a rule."""

MAY_LACK = {content: ("split", *OPTIONAL_COLUMNS.get(content, ())) for content in CONTENT_COLUMNS}
"""Content → columns that a table of it may lack."""

COLUMN_TYPES: dict[str, pa.DataType] = {
    **dict.fromkeys(("prompt", "response", "chosen", "rejected", "split", "answer", "subgroup"), pa.string()),
    **dict.fromkeys(("response_extra", "chosen_extra", "rejected_extra"), pa.string()),
    "margin": pa.float64(),
    "label": pa.bool_(),
    "responses": pa.list_(pa.string()),
    "ranks": pa.list_(pa.float64()),
    "messages": pa.list_(pa.struct([(name, pa.string()) for name in ("role", "content", "extra")])),
}
"""Our column → its type."""

SPLITS = ("train", "validation", "test")
REPEATED = "repeats an earlier row"
"""Reason for a row that equals an earlier one in all required columns."""
TIE = "neither response is preferred"
"""Reason for a row whose labels are a tie: nothing is wrong with it, but it ranks nothing."""
UNPAIRED = "no other answer to its prompt is graded otherwise"
"""Reason for a single answer that is part of no pair and no ranking."""
WITHOUT_BLAME = (REPEATED, TIE, UNPAIRED)
"""Reasons for rows that are left out although nothing is wrong with them."""
FAULT = "fault"
"""An optional column of batches: null, or the reason why the row could not be read."""
SOURCE_ROW = "source_row"
"""An optional column of batches: the row's number in the file, where it is not its place among all rows."""
FAULT_TYPE = pa.struct([("reason", pa.string()), ("shown", pa.string())])
SLICE_ROWS = 10_000
"""Rows checked together; this bounds memory."""
SHOWN_ROWS = 10
_SHOWN_CHARACTERS = 60
_DIGEST_BYTES = 16


class UnusableTable(ValueError):
    """A table has no usable row: columns are missing or of another type, or no row is valid."""


@dataclass(frozen=True)
class Rule:
    """A rule that every row must satisfy."""

    reason: str
    """Fault of a row that breaks it, for example ``prompt is empty``."""
    column: str
    broken: Callable[[pa.Table], Mask]


@dataclass(frozen=True)
class BadRow:
    """A dropped row."""

    row: int
    """Its index in the input, from 0."""
    column: str
    reason: str
    value: str
    """The first characters of the column's value."""

    def __str__(self) -> str:
        return f"row {self.row}: {self.reason}: {self.value}"


@dataclass(frozen=True)
class Report:
    """Numbers of rows and dropped rows. A row that breaks several rules is counted under the first."""

    content: str
    num_rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason → number of rows."""
    first: tuple[BadRow, ...] = ()
    """The first bad rows, ten at most."""

    @property
    def num_dropped(self) -> int:
        """Number of dropped rows."""
        return sum(self.dropped.values())

    @property
    def num_repeated(self) -> int:
        """Number of rows dropped because they repeat an earlier one."""
        return self.dropped.get(REPEATED, 0)

    def __str__(self) -> str:
        counts = "".join(f"\n  {count} x {reason}" for reason, count in self.dropped.items())
        shown = "".join(f"\n  {row}" for row in self.first)
        head = f"{self.content}: {self.num_dropped} of {self.num_rows} rows are unusable"
        return head + (f"{counts}\nThe first of them:{shown}" if self.first else "")


# -- rules


def rules(content: str) -> tuple[Rule, ...]:
    """Return the rules for rows, in the order in which they are checked; repeats are checked afterwards."""
    texts = [column for column in CONTENT_COLUMNS[content] if COLUMN_TYPES[column] == pa.string()]
    found = [Rule(f"{column} is missing", column, _null(column)) for column in texts]
    found += [Rule(f"{column} is empty", column, _empty(column)) for column in texts]
    found += [Rule(f"{column} holds a NUL byte", column, _nul(column)) for column in texts]
    if content == "preferences":
        found.append(Rule("chosen equals rejected", "chosen", _equal("chosen", "rejected")))
        found.append(Rule("margin is negative or not finite", "margin", _bad_margin))
    if content == "rankings":
        found += _ranking_rules()
    if content == "labelled_responses":
        found.append(Rule("label is missing", "label", _null("label")))
    found.append(Rule(f"split is none of {', '.join(SPLITS)}", "split", _unknown_split))
    return tuple(found)


def _ranking_rules() -> list[Rule]:
    return [
        Rule("responses are missing", "responses", _null("responses")),
        Rule("ranks are missing", "ranks", _null("ranks")),
        Rule("there are fewer than two responses", "responses", _too_few_responses),
        Rule("a response is missing", "responses", _any_item("responses", pc.is_null)),
        Rule("a response is empty", "responses", _any_item("responses", _are_empty)),
        Rule("a response holds a NUL byte", "responses", _any_item("responses", _hold_nul)),
        Rule("responses and ranks differ in number", "ranks", _other_number_of_ranks),
        Rule("a rank is missing or not finite", "ranks", _any_item("ranks", _are_not_finite)),
        Rule("all ranks are equal, so nothing is ranked", "ranks", _equal_ranks),
        Rule("one response has two ranks", "ranks", _two_ranks),
    ]


def _null(column: str) -> Callable[[pa.Table], Mask]:
    return lambda table: pc.is_null(table[column])


def _empty(column: str) -> Callable[[pa.Table], Mask]:
    """Return which rows have an empty text. A response that only calls tools has its calls beside the text."""

    def broken(table: pa.Table) -> Mask:
        empty, extra = _are_empty(table[column]), f"{column}_extra"
        if extra not in table.column_names:
            return empty
        return pc.and_(empty, pc.invert(pc.match_substring(pc.fill_null(table[extra], ""), '"tool_calls"')))

    return broken


def _nul(column: str) -> Callable[[pa.Table], Mask]:
    return lambda table: _hold_nul(table[column])


def _equal(one: str, other: str) -> Callable[[pa.Table], Mask]:
    def broken(table: pa.Table) -> Mask:
        equal = pc.fill_null(pc.equal(table[one], table[other]), False)
        extras = [f"{side}_extra" for side in (one, other)]
        if not set(extras) <= set(table.column_names):
            return equal
        of_one, of_other = (pc.fill_null(table[extra], "") for extra in extras)
        return pc.and_(equal, pc.equal(of_one, of_other))

    return broken


def _bad_margin(table: pa.Table) -> Mask:
    """Return which rows have an invalid margin; a missing margin is valid."""
    if "margin" not in table.column_names:
        return _no_row(table)
    margin = table["margin"]
    return pc.fill_null(pc.or_(pc.invert(pc.is_finite(margin)), pc.less(margin, 0)), False)


def _unknown_split(table: pa.Table) -> Mask:
    if "split" not in table.column_names:
        return _no_row(table)
    return pc.invert(pc.is_in(table["split"], pa.array(SPLITS)))


def _too_few_responses(table: pa.Table) -> Mask:
    return pc.fill_null(pc.less(pc.list_value_length(table["responses"]), 2), False)


def _other_number_of_ranks(table: pa.Table) -> Mask:
    responses, ranks = (pc.list_value_length(table[column]) for column in ("responses", "ranks"))
    return pc.fill_null(pc.not_equal(responses, ranks), False)


def _equal_ranks(table: pa.Table) -> Mask:
    return _mask([ranks is not None and len(set(ranks)) == 1 for ranks in table["ranks"].to_pylist()])


def _two_ranks(table: pa.Table) -> Mask:
    """Return which rows have one text with two ranks. The same text twice with one rank is a tie, as samples of a policy
    may be."""
    broken = []
    for texts, ranks in zip(table["responses"].to_pylist(), table["ranks"].to_pylist(), strict=True):
        ranked = set(zip(texts or (), ranks or (), strict=False))  # another rule checks the lengths
        broken.append(len(ranked) > len({text for text, _ in ranked}))
    return _mask(broken)


def _any_item(column: str, are_broken: Callable[[Mask], Mask]) -> Callable[[pa.Table], Mask]:
    """Return which rows' lists contain an item that breaks a rule, from the rule's mask over all items of all rows."""

    def broken(table: pa.Table) -> Mask:
        lengths = pc.fill_null(pc.list_value_length(table[column]), 0).to_pylist()
        row_of_item = [row for row, length in enumerate(lengths) for _ in range(length)]
        masks = are_broken(pc.list_flatten(table[column])).to_pylist()
        rows = {row for row, is_broken in zip(row_of_item, masks, strict=True) if is_broken}
        return _mask([row in rows for row in range(table.num_rows)])

    return broken


def _are_empty(texts: Mask) -> Mask:
    return pc.fill_null(pc.equal(pc.utf8_trim_whitespace(texts), ""), False)


def _hold_nul(texts: Mask) -> Mask:
    return pc.fill_null(pc.match_substring(texts, "\0"), False)


def _are_not_finite(numbers: Mask) -> Mask:
    return pc.invert(pc.fill_null(pc.is_finite(numbers), False))


def _no_row(table: pa.Table) -> Mask:
    return _mask([False] * table.num_rows)


def _mask(broken: list[bool]) -> Mask:
    return pa.chunked_array([pa.array(broken, pa.bool_())])


# -- checking rows


def known_columns(content: str) -> tuple[str, ...]:
    """Return all required and optional columns of a content."""
    return (*CONTENT_COLUMNS[content], *MAY_LACK.get(content, ()))


class RowCheck:
    """Checks the rows of one dataset, batch after batch; mutable."""

    def __init__(self, content: str, *, allow_repeats: bool = False) -> None:
        """
        Args:
            content: content of the rows.
            allow_repeats: do not drop rows that are equal in all required columns; otherwise only the first is kept.
        """
        self._content = content
        self._seen = None if allow_repeats else DigestSet(_DIGEST_BYTES)
        self._num_rows = 0
        self._dropped: Counter[str] = Counter()
        self._first: list[BadRow] = []
        self._first_blameless: list[BadRow] = []

    def report(self) -> Report:
        """Return a report on all rows so far. Rows without faults are among the first ones only if faults leave room."""
        shown = [*self._first, *self._first_blameless][:SHOWN_ROWS]
        first = tuple(sorted(shown, key=lambda bad: bad.row))
        return Report(self._content, self._num_rows, dict(self._dropped), first)

    def check(self, batch: pa.RecordBatch | pa.Table) -> tuple[pa.Table, list[bool]]:
        """Return the batch with the types of our columns, and which of its rows can be used; the others are counted.

        Raises:
            UnusableTable: a column is missing or of another type.
        """
        table = _typed(batch, self._content)
        broken = [(rule.reason, rule.column, rule.broken(table).to_pylist()) for rule in rules(self._content)]
        compared = [
            *CONTENT_COLUMNS[self._content],
            *(column for column in MADE_COLUMNS if column in table.column_names),
        ]
        keys = [table[column].to_pylist() for column in compared]
        has_faults = FAULT in table.column_names
        faults = table[FAULT].to_pylist() if has_faults else [None] * table.num_rows
        numbers = (
            table[SOURCE_ROW].to_pylist()
            if SOURCE_ROW in table.column_names
            else range(self._num_rows, self._num_rows + table.num_rows)
        )
        keep = []
        for i, fault in enumerate(faults):
            why = next(((reason, column) for reason, column, mask in broken if mask[i]), None)
            if fault is not None:
                self._count(BadRow(numbers[i], FAULT, fault["reason"], _shown(fault["shown"])))
            elif why is None and self._seen is not None and self._is_repeat([column[i] for column in keys]):
                why = (REPEATED, "prompt")
            if fault is None and why is not None:
                reason, column = why
                self._count(BadRow(numbers[i], column, reason, _shown(table[column][i].as_py())))
            keep.append(fault is None and why is None)
        self._num_rows += table.num_rows
        return table, keep

    def _is_repeat(self, values: list[str | list[Any]]) -> bool:
        assert self._seen is not None
        # No text holds a NUL, and a row has as many ranks as responses, so different rows give different texts.
        parts = [str(part) for value in values for part in (value if isinstance(value, list) else [value])]
        digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=_DIGEST_BYTES).digest()
        return not self._seen.add(digest)

    def _count(self, bad: BadRow) -> None:
        self._dropped[bad.reason] += 1
        first = self._first_blameless if bad.reason in WITHOUT_BLAME else self._first
        if len(first) < SHOWN_ROWS:
            first.append(bad)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _typed(batch: pa.RecordBatch | pa.Table, content: str) -> pa.Table:
    """Return the batch with columns cast to the schema's types; files may have large and dictionary-encoded strings."""
    table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
    may_lack = (*table.column_names, *MAY_LACK.get(content, ()))
    missing = [name for name in known_columns(content) if name not in may_lack]
    if missing:
        there = ", ".join(table.column_names)
        raise UnusableTable(f"{content}: there is no column {', '.join(missing)}; there are: {there}")
    for position, column in enumerate(table.column_names):
        if column not in known_columns(content):
            continue
        found, wanted = table.schema.field(column).type, COLUMN_TYPES[column]
        if not _fits(found, wanted):
            kind = _kind(wanted)
            raise UnusableTable(f"{content}: column {column} is {found}, not {kind}; name a column of {kind}")
        table = table.set_column(position, column, table[column].cast(wanted))
    return table


def _kind(wanted: pa.DataType) -> str:
    if pa.types.is_list(wanted):
        return f"lists of {_kind(wanted.value_type)}"
    if pa.types.is_struct(wanted):
        return "messages"
    if pa.types.is_boolean(wanted):
        return "true and false"
    return "text" if wanted == pa.string() else "numbers"


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_dictionary(found):
        return _fits(found.value_type, wanted)
    if pa.types.is_null(found):
        return True
    if pa.types.is_list(wanted):
        return _is_list(found) and _fits(found.value_type, wanted.value_type)
    if pa.types.is_struct(wanted):
        return pa.types.is_struct(found) and all(
            found.get_field_index(part.name) >= 0 and _fits(found.field(part.name).type, part.type)
            for part in wanted
        )
    if pa.types.is_boolean(wanted):
        return bool(pa.types.is_boolean(found))
    if wanted == pa.string():
        return bool(
            pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found)
        )
    return bool(pa.types.is_integer(found) or (pa.types.is_floating(found) and wanted == pa.float64()))


def _is_list(found: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_fixed_size_list(found)
    )
