"""Map a single row to our columns."""

from collections.abc import Mapping
from typing import Any

from vantage.tasks.data.columns import Row, RowMapper


def map_row(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return one row on its own, as ``RowMapper.map``.

    Raises:
        MissingColumn: the row lacks a column, or a part of a path.
        ValueError: a value has the wrong kind, or a column that is not text has a template.
    """
    mapper = RowMapper(columns)
    mapped = mapper.map(row)
    for error in mapper.never_found():
        raise error
    return mapped
