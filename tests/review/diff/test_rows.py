"""Rows that one file has and another has not are those of a count in memory."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vantage.review.diff.rows import row_difference


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_compared_as_multisets_wherever_they_stand(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rows = [
        [{"prompt": str(draw.randrange(400)), "n": draw.randrange(2)} for _ in range(size)]
        for size in (900, 700)
    ]
    found = row_difference(*(written(tmp_path / f"{i}.parquet", each) for i, each in enumerate(rows)))
    a, b = (Counter(json.dumps(row, sort_keys=True) for row in each) for each in rows)
    assert (found.rows_a, found.rows_b) == (900, 700)
    assert (found.added, found.removed) == (sum((b - a).values()), sum((a - b).values()))
    assert found.added > 0
    assert found.removed > 0
    new = [row for row in rows[1] if json.dumps(row, sort_keys=True) in b - a][:3]
    assert list(found.examples_added) == [{"prompt": row["prompt"], "n": str(row["n"])} for row in new]


def test_the_order_of_rows_and_columns_and_an_empty_column_say_nothing(tmp_path: Path) -> None:
    a = written(tmp_path / "a.parquet", [{"x": 1, "y": [1, None]}, {"x": 2, "y": []}])
    b = written(tmp_path / "b.parquet", [{"y": [], "z": None, "x": 2}, {"y": [1, None], "z": None, "x": 1}])
    found = row_difference(a, b)
    assert (found.added, found.removed) == (0, 0)


def test_a_row_that_is_there_once_more_is_added_once(tmp_path: Path) -> None:
    a = written(tmp_path / "a.parquet", [{"x": 1}])
    b = written(tmp_path / "b.parquet", [{"x": 1}, {"x": 1}])
    assert (row_difference(a, b).added, row_difference(b, a).removed) == (1, 1)


def test_values_of_two_types_are_different(tmp_path: Path) -> None:
    a, b = (written(tmp_path / f"{value!r}.parquet", [{"x": value}]) for value in ("1", 1))
    assert (row_difference(a, b).added, row_difference(a, b).removed) == (1, 1)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    b = written(tmp_path / "b.parquet", [{"x": 1}, {"x": 2}])
    found = row_difference(None, b)
    assert (found.rows_a, found.added, found.removed) == (0, 2, 0)
    assert row_difference(None, None).added == 0


def test_examples_are_the_first_rows_of_each_file(tmp_path: Path) -> None:
    a = written(tmp_path / "a.parquet", [{"x": f"a {n}"} for n in range(100)])
    b = written(tmp_path / "b.parquet", [{"x": f"b {n}"} for n in range(100)])
    found = row_difference(a, b)
    assert [row["x"] for row in found.examples_removed] == ["a 0", "a 1", "a 2"]
    assert [row["x"] for row in found.examples_added] == ["b 0", "b 1", "b 2"]


def test_examples_are_short_and_harmless(tmp_path: Path) -> None:
    b = written(tmp_path / "b.parquet", [{"x": "\x1b[2J" + "long " * 100}])
    (example,) = row_difference(None, b).examples_added
    assert "\x1b" not in example["x"]
    assert len(example["x"]) <= 160


def test_what_is_no_parquet_is_an_error_of_a_kind_that_commands_explain(tmp_path: Path) -> None:
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    with pytest.raises((ValueError, OSError)):
        row_difference(None, tmp_path / "b.parquet")
