"""Read rows of a user's file as rows of one content, recognised or mapped, with the reason if they cannot be read."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from vantage.schemas.recipe.inputs import Data
from vantage.schemas.row_rules import COLUMN_TYPES, FAULT, FAULT_TYPE, SOURCE_ROW
from vantage.schemas.source_files import data_format
from vantage.schemas.steps import CONTENT_COLUMNS, MADE_COLUMNS
from vantage.tasks.data.assembly import Assembly
from vantage.tasks.data.columns import MissingColumn, RowMapper, WrongValue, short
from vantage.tasks.data.formats import SAMPLE_ROWS, recognise
from vantage.tasks.data.published_formats import MAPPED, Format, optional_columns, own_format
from vantage.tasks.data.row_faults import Fault, SourceRow
from vantage.tasks.data.single_answers import Numbered, are_single, by_prompt, grade_of

log = logging.getLogger(__name__)


class RowReader:
    """Turns the rows of one file into rows of one content."""

    def __init__(
        self, data: Data, content: str, first_rows: Iterable[SourceRow], *, ending: str | None = None
    ) -> None:
        """
        Args:
            data: the recipe's entry of the file; without ``columns``, its format is recognised.
            content: content of the rows.
            first_rows: the first ``SAMPLE_ROWS`` of the file.
            ending: format of the file, if its source does not name it.

        Raises:
            GarbledRows: the texts are not prompts and responses.
        """
        is_text = (ending or data_format(data.source) or "").startswith(".csv")
        self.format = format_of(data, content, first_rows, is_text=is_text)
        optional = optional_columns(content) if self.format.is_own else ()
        self._mapper = RowMapper(self.format.columns, optional=optional, is_text=is_text, keeps_turns=True)
        self._content, self._are_single = content, are_single(content, self._mapper.columns)
        made_of = "demonstrations" if self._are_single else content
        self._assembly = Assembly(made_of, tuple(self._mapper.columns), self.format.labels, data.system)
        self._made_columns: set[str] = set()
        if self._are_single:
            for column in {"margin", "subgroup", "ranks"} & set(self._mapper.columns):
                raise ValueError(
                    f"columns.{column}: single answers with a score or a label have none; remove it"
                )

    def read(self, row: SourceRow) -> Mapping[str, Any] | Fault:
        """Return the row's columns, or the reason why it cannot be read."""
        if isinstance(row, Fault):
            return row
        try:
            values = self._mapper.map(row)
            made = self._assembly.assemble(values)
            if self._are_single:
                if made.pop("response_extra", None):
                    raise ValueError(
                        "an answer with calls of tools or reasoning, which graded answers cannot have"
                    )
                made["grade"] = grade_of(values, self.format.labels)
        except WrongValue as error:
            return Fault(error.reason, error.shown)
        except MissingColumn:
            raise
        except ValueError as error:
            return Fault(str(error).partition(";")[0], short(row))
        self._made_columns.update(column for column in MADE_COLUMNS if made.get(column) is not None)
        return made

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the resulting rows."""
        return (*CONTENT_COLUMNS[self._content], "messages") if self._are_single else self._assembly.made

    def made(self, rows: Iterable[SourceRow], folder: Path) -> Iterator[Numbered]:
        """Return the rows that are made of all rows of the file, with their numbers in it; single answers are put together by prompt.

        Args:
            folder: folder for temporary files.
        """
        read = enumerate(map(self.read, rows))
        if not self._are_single:
            return read
        are_marks = "label" in self._mapper.columns and "score" not in self._mapper.columns
        return by_prompt(read, content=self._content, are_marks=are_marks, folder=folder)

    def table(self, made: Iterable[Numbered]) -> pa.Table:
        """Return the rows; one that could not be read has the reason in ``vantage.schemas.row_rules.FAULT``."""
        rows = [
            {**({FAULT: asdict(row)} if isinstance(row, Fault) else row), SOURCE_ROW: number}
            for number, row in made
        ]
        types = [
            *((column, COLUMN_TYPES[column]) for column in self.columns),
            (FAULT, FAULT_TYPE),
            (SOURCE_ROW, pa.int64()),
        ]
        return pa.Table.from_pylist(rows, schema=pa.schema(types))

    def refuse_wrong_columns(self) -> None:
        """Refuse a mapping of columns that has found nothing in any row.

        Raises:
            MissingColumn: no row so far has the value that a column is mapped to.
        """
        for error in self._mapper.never_found():
            raise error

    def unread(self, names: Collection[str]) -> list[str]:
        """Return the columns of the file that are not read."""
        read = [path if path in names else path.partition(".")[0] for path in self._mapper.paths()]
        return [name for name in names if not any(name == each or fnmatchcase(name, each) for each in read)]

    def absent(self) -> list[str]:
        """Return the optional columns that no row had."""
        made = [column for column in MADE_COLUMNS if column not in self._made_columns]
        return [*self._mapper.absent(), *made]


def reader_of(
    data: Data, content: str, rows: Iterator[SourceRow], *, ending: str | None = None
) -> tuple[RowReader, Iterator[SourceRow]]:
    """Return a reader of the rows, and all the rows again. ``ending``: as for ``RowReader``."""
    first = list(islice(rows, SAMPLE_ROWS))
    return RowReader(data, content, first, ending=ending), chain(first, rows)


def format_of(data: Data, content: str, first_rows: Iterable[SourceRow], *, is_text: bool) -> Format:
    """Return the recipe's mapping; without one, the format that the first rows are in; without that, our own columns."""
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
