"""Labelled responses are read in the formats of published files, some rows are left out, and a stage reads the rest."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tasks.data.test_inspection import lines, prepared
from vantage.schemas.recipe.inputs import Data
from vantage.schemas.row_rules import UnusableTable
from vantage.schemas.tables import usable_rows
from vantage.tasks.data.arithmetic import DIALS, labelled_responses, preferences
from vantage.tasks.data.columns import MissingColumn
from vantage.tasks.data.inspection import inspect_file
from vantage.tasks.data.row_reader import RowReader

Row = dict[str, Any]
EXPECTED = [(f"ask {n}", f"answer {n}", n % 3 > 0) for n in range(12)]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


def kept(path: Path, folder: Path) -> list[tuple[str, str, bool]]:
    _, rows = prepared(path, "labelled_responses", folder / "scratch")
    return [(row["prompt"], row["response"], row["label"]) for row in rows]


LAYOUTS: dict[str, Any] = {
    "our own columns": lambda p, r, label: {"prompt": p, "response": r, "label": label},
    "TRL's": lambda p, r, label: {"prompt": p, "completion": r, "label": label},
    "TRL's, in messages": lambda p, r, label: {"prompt": [user(p)], "completion": [assistant(r)], "label": label},
    "a conversation": lambda p, r, label: {"messages": [user(p), assistant(r)], "label": label},
    "LLaMA-Factory's": lambda p, r, label: {"messages": [user(p), assistant(r)], "label": str(label).lower()},
    "desirable": lambda p, r, label: {"instruction": p, "output": r, "desirable": label},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_are_recognised(name: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [LAYOUTS[name](*row) for row in EXPECTED])
    assert kept(path, tmp_path) == EXPECTED


def test_a_csv_file_and_a_parquet_file_have_the_same_rows(tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion", "label"])
        writer.writerows(EXPECTED)
    columns = dict(
        zip(("prompt", "completion", "label"), map(list, zip(*EXPECTED, strict=True)), strict=True)
    )
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert kept(tmp_path / "rows.csv", tmp_path) == EXPECTED
    (tmp_path / "second").mkdir()
    assert kept(tmp_path / "rows.parquet", tmp_path / "second") == EXPECTED


def test_words_and_numbers_that_the_recipe_names() -> None:
    data = Data(
        source="x.jsonl",
        columns={"prompt": "q", "response": "a", "label": "vote"},
        labels={"first": ["up", 5], "second": ["down", 1], "tie": ["-"]},
    )
    rows = [{"q": "x", "a": "y", "vote": vote} for vote in ("up", 5, "down", 1, "-", "sideways", None)]
    reader = RowReader(data, "labelled_responses", rows)
    found = [reader.read(row) for row in rows]
    assert [row["label"] for row in found[:4]] == [True, True, False, False]  # type: ignore[index]
    assert ["neither" in str(found[4]), "is not known" in str(found[5]), "no label" in str(found[6])] == [
        True
    ] * 3


def test_rows_that_are_left_out_are_counted_with_the_reason(tmp_path: Path) -> None:
    rows = [LAYOUTS["our own columns"](*row) for row in EXPECTED]
    wrong = [
        {"prompt": "p", "response": "r", "label": None},
        {"prompt": "p", "response": " ", "label": True},
        {"prompt": None, "response": "r", "label": False},
        {"prompt": "p", "response": "r", "label": "perhaps"},
    ]
    again = rows[3]
    other_label = {**rows[3], "label": not rows[3]["label"]}
    path = lines(tmp_path / "rows.jsonl", [*rows, *wrong, again, other_label])
    report, found = prepared(path, "labelled_responses", tmp_path / "scratch")
    assert [(row["prompt"], row["response"], row["label"]) for row in found] == [
        *EXPECTED,
        tuple(other_label.values()),
    ]
    assert report.num_dropped == 5 and report.num_repeated == 1
    assert any("label" in reason for reason in report.dropped)


def test_a_file_without_labels_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"prompt": p, "response": r} for p, r, _ in EXPECTED])
    with pytest.raises((UnusableTable, MissingColumn), match="label"):
        prepared(path, "labelled_responses", tmp_path / "scratch")


def test_inspection_shows_them_beside_the_pairs_that_they_could_make(tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": r, "label": label} for p, r, label in EXPECTED]
    path = lines(tmp_path / "rows.jsonl", rows)
    found, _ = inspect_file(path, "labelled_responses")
    assert (found.content, found.num_usable) == ("labelled_responses", len(rows))
    assert "label: label" in found.recipe and "response: completion" in found.recipe


def test_marked_answers_of_which_no_prompt_repeats_are_shown_as_what_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": r, "label": label} for p, r, label in EXPECTED]
    alone, _ = inspect_file(lines(tmp_path / "alone.jsonl", rows), None)
    assert alone.content == "labelled_responses"
    again = [{**row, "completion": f"{row['completion']}!", "label": not row["label"]} for row in rows]
    several, _ = inspect_file(lines(tmp_path / "several.jsonl", [*rows, *again]), None)
    assert several.content == "preferences" and "labelled_responses" in several.also


def test_the_built_in_ones_are_one_side_of_each_built_in_pair() -> None:
    found = list(labelled_responses(seed=0, count=50, dial=DIALS["arithmetic"]))
    pairs = list(preferences(seed=0, count=50, dial=DIALS["arithmetic"]))
    for row, pair in zip(found, pairs, strict=True):
        assert row["response"] == pair["chosen" if row["label"] else "rejected"]
        assert row["prompt"] == pair["prompt"]
    assert 10 < sum(row["label"] for row in found) < 40
    assert json.loads(json.dumps(found[0])) == found[0]


def test_a_row_without_a_label_is_unusable_whoever_made_the_table() -> None:
    table = pa.table({"prompt": ["p", "q"], "response": ["r", "s"], "label": [True, None]})
    rows, report = usable_rows([table], content="labelled_responses")
    assert [row for batch in rows for row in batch.to_pylist()] == [
        {"prompt": "p", "response": "r", "label": True}
    ]
    assert report().dropped == {"label is missing": 1}
