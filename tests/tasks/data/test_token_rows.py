from pathlib import Path

import pytest

from vantage.tasks.data import token_rows
from vantage.tasks.data.token_rows import GroupedRows, JsonRowsWriter, TokenRowsWriter

ROWS = [[5, 2**31 - 1], [], [-7], [1, 2, 3]]


@pytest.mark.parametrize("in_a_file", [False, True])
def test_rows_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_file: bool
) -> None:
    monkeypatch.setattr(token_rows, "_IN_MEMORY", 8)
    writer = TokenRowsWriter(tmp_path if in_a_file else None)
    writer.extend(ROWS[:2])
    writer.extend(iter(ROWS[2:]))
    rows = writer.rows()
    assert list(rows) == ROWS
    assert (len(rows), rows[-1], rows[1:3]) == (4, [1, 2, 3], [[], [-7]])
    assert rows.lengths().tolist() == [2, 0, 1, 3]
    assert list(tmp_path.iterdir()) == []  # the file has no name
    with pytest.raises(IndexError):
        rows[4]


def test_there_may_be_none() -> None:
    """There may be no rows at all."""
    rows = TokenRowsWriter(None).rows()
    assert (len(rows), list(rows), rows.lengths().tolist()) == (0, [], [])


def test_groups_of_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    groups = [[[1, 2], [3]], [[], [4], [5, 6]], [[7], [8]]]
    writer = TokenRowsWriter(tmp_path)
    writer.extend(row for group in groups for row in group)
    read = GroupedRows(writer.rows(), [2, 3, 2])
    assert list(read) == groups and len(read) == 3
    assert read[-1] == groups[2] and read[1:] == groups[1:]
    with pytest.raises(IndexError):
        read[3]


@pytest.mark.parametrize("in_a_file", [False, True])
def test_texts_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_file: bool
) -> None:
    monkeypatch.setattr(token_rows, "_IN_MEMORY", 8)
    values = ["", None, 'größer 翻译 🙂\n"', [{"role": "user", "content": "إدخال", "extra": None}], "null"]
    writer = JsonRowsWriter(tmp_path if in_a_file else None)
    writer.extend(values[:2])
    writer.extend(iter(values[2:]))
    rows = writer.rows()
    assert list(rows) == values and len(rows) == 5
    assert (rows[-1], rows[1:3]) == ("null", values[1:3])
    with pytest.raises(IndexError):
        rows[5]


def test_there_may_be_no_texts() -> None:
    assert list(JsonRowsWriter(None).rows()) == []
