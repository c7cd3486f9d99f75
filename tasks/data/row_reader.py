"""Rows of a user's file as rows of one content: recognised or mapped, read, and with the reason where they cannot be."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from schemas.recipe.inputs import Data
from schemas.row_rules import COLUMN_TYPES, FAULT, FAULT_TYPE
from schemas.source_files import data_format
from tasks.data.assembly import Assembly
from tasks.data.columns import MissingColumn, RowMapper, WrongValue, short
from tasks.data.formats import MAPPED, SAMPLE_ROWS, Format, optional_columns, own_format, recognise
from tasks.data.source_rows import Fault, SourceRow

log = logging.getLogger(__name__)


class RowReader:
    """Turns the rows of one file into rows of one content."""

    def __init__(self, data: Data, content: str, first_rows: Iterable[SourceRow]) -> None:
        """
        Args:
            data: what the recipe says of the file; without ``columns``, its format is recognised.
            content: content of the rows.
            first_rows: the first ``SAMPLE_ROWS`` of the file.

        Raises:
            GarbledRows: their texts hold something else than prompts and responses.
        """
        is_text = (data_format(data.source) or "").startswith(".csv")
        self.format = format_of(data, content, first_rows, is_text=is_text)
        optional = optional_columns(content) if self.format.is_own else ()
        self._mapper = RowMapper(self.format.columns, optional=optional, is_text=is_text, keeps_turns=True)
        self._assembly = Assembly(content, tuple(self._mapper.columns), self.format.labels, data.system)
        self._has_messages = False

    def read(self, row: SourceRow) -> Mapping[str, Any] | Fault:
        """The row's columns, or why it cannot be read."""
        if isinstance(row, Fault):
            return row
        try:
            made = self._assembly.assemble(self._mapper.map(row))
        except WrongValue as error:
            return Fault(error.reason, error.shown)
        except MissingColumn:
            raise
        except ValueError as error:
            return Fault(str(error).partition(";")[0], short(row))
        self._has_messages = self._has_messages or made["messages"] is not None
        return made

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the rows that it makes."""
        return self._assembly.made

    def table(self, made: Iterable[Mapping[str, Any] | Fault]) -> pa.Table:
        """Rows that it made; one that could not be read says why in ``schemas.row_rules.FAULT``."""
        rows = [{FAULT: asdict(row)} if isinstance(row, Fault) else dict(row) for row in made]
        types = [*((column, COLUMN_TYPES[column]) for column in self.columns), (FAULT, FAULT_TYPE)]
        return pa.Table.from_pylist(rows, schema=pa.schema(types))

    def refuse_wrong_columns(self) -> None:
        """
        Raises:
            MissingColumn: no row so far has what a column is mapped to.
        """
        for error in self._mapper.never_found():
            raise error

    def unread(self, names: Collection[str]) -> list[str]:
        """Those of the file's columns that nothing is read from."""
        read = [path if path in names else path.partition(".")[0] for path in self._mapper.paths()]
        return [name for name in names if not any(name == each or fnmatchcase(name, each) for each in read)]

    def absent(self) -> list[str]:
        """The optional columns that no row had."""
        return [*self._mapper.absent(), *([] if self._has_messages else ["messages"])]


def reader_of(data: Data, content: str, rows: Iterator[SourceRow]) -> tuple[RowReader, Iterator[SourceRow]]:
    """A reader of the rows, and all the rows again."""
    first = list(islice(rows, SAMPLE_ROWS))
    return RowReader(data, content, first), chain(first, rows)


def format_of(data: Data, content: str, first_rows: Iterable[SourceRow], *, is_text: bool) -> Format:
    """The recipe's mapping; without one, the format that the first rows are in; without that, our own columns."""
    if data.columns:
        return Format(MAPPED, {str(ours): theirs for ours, theirs in data.columns.items()}, _labels_of(data))
    rows = [row for row in first_rows if not isinstance(row, Fault)]
    found = recognise(rows, content, is_text=is_text)
    if found is None:
        return own_format(content)
    if not found.is_own:
        log.info("the file holds %s: %s", found.name, found.columns)
    return found


def _labels_of(data: Data) -> dict[str, tuple[str, ...]]:
    labels = data.labels
    return {} if labels is None else {"first": labels.first, "second": labels.second, "tie": labels.tie}
