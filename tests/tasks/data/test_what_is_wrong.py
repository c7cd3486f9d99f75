"""A file in no known format is refused with the reason, and with what to do about it."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.tasks.data.inspection import UnknownData, inspect_file


def _lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _turns(asked: str, said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def _pair(number: int, chosen: str, rejected: str = "No idea.") -> dict[str, Any]:
    """Return a row in the form of binarised preferences, which contains the chosen conversation twice."""
    asked = f"Name river {number}."
    return {
        "prompt": asked,
        "chosen": _turns(asked, chosen),
        "rejected": _turns(asked, rejected),
        "messages": _turns(asked, chosen),
    }


@pytest.mark.parametrize("num_empty, num_equal", [(4, 5), (8, 0), (0, 9), (9, 1)])
def test_pairs_with_empty_and_equal_sides_are_pairs(tmp_path: Path, num_empty: int, num_equal: int) -> None:
    whole = [_pair(number, f"River {number}.") for number in range(20 - num_empty - num_equal)]
    empty = [_pair(100 + number, "") for number in range(num_empty)]
    equal = [_pair(200 + number, "No idea.") for number in range(num_equal)]
    found, _ = inspect_file(_lines(tmp_path / "pairs.jsonl", [*whole, *empty, *equal]), None)
    assert found.content == "preferences"
    counted = {"chosen is empty": num_empty, "chosen equals rejected": num_equal}
    assert found.problems == {reason: count for reason, count in counted.items() if count}
    assert (found.num_rows, found.num_usable) == (20, len(whole))


def test_rows_of_which_most_have_no_second_side_are_no_pairs(tmp_path: Path) -> None:
    rows = [_pair(number, "" if number % 3 else "Some river.") for number in range(21)]
    found, _ = inspect_file(_lines(tmp_path / "few.jsonl", rows), None)
    assert found.content == "prompts"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            [{"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}]}] * 3,
            r"demonstrations as conversations .*: a message is by 'narrator'; it is one of ai, answer",
        ),
        ([{"text": "Q: a\nA: b"}] * 3, r"demonstrations as conversations .*does not begin with Human: or System:"),
        ([{"messages": [{"role": "user"}]}] * 3, r"as conversations .*'messages'"),
    ],
)  # fmt: skip
def test_the_reason_is_said_also_of_a_single_column(
    tmp_path: Path, rows: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(UnknownData, match=rf"in no known format.*\n.*{reason}"):
        inspect_file(_lines(tmp_path / "rows.jsonl", rows), None)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"version": 1, "data": [{"prompt": "a", "response": "b"}] * 2},
            r"it holds one object, whose 'data' is a list of 2 rows; write the list alone: jq '\.\"data\"' whole.json > rows.json",
        ),
        (
            {"prompt": ["a", "b"], "response": ["c", "d"]},
            r"it is laid out by columns, a list for each; write it by rows",
        ),
        (
            {"1": {"prompt": "a", "response": "b"}, "2": {"prompt": "c", "response": "d"}},
            r"a row under each of its keys; write the rows as a list: jq '\[\.\[\]\]' whole.json > rows.json",
        ),
    ],
)  # fmt: skip
def test_rows_within_one_object_are_named(
    tmp_path: Path, content: dict[str, Any], said: str, indent: int | None
) -> None:
    path = tmp_path / "whole.json"
    path.write_text(json.dumps(content, indent=indent))
    with pytest.raises(UnknownData, match=said):
        inspect_file(path, None)


def test_one_conversation_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"messages": _turns("a", "b")}))
    found, _ = inspect_file(path, None)
    assert found.num_usable == 1


@pytest.mark.parametrize("text, said", [("{\n", "not JSON: {"), ("3\n", "not an object {column: value}: 3")])
def test_rows_that_cannot_be_read_are_shown_in_words(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UnknownData) as refused:
        inspect_file(path, None)
    hint = ".jsonl has an object on each line"
    assert str(refused.value) == f"{path}: none of its first 1 rows can be read; the first is {said}; {hint}"


def test_a_list_of_rows_under_the_wrong_ending_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps([{"prompt": "a", "response": "b"}] * 2))
    with pytest.raises(
        UnknownData, match="one JSON list, and .jsonl has an object on each line; rename it to .json"
    ):
        inspect_file(path, None)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"row": {"asked": "a", "given": "b"}}, "row holds objects with asked, given; `columns` names a field of them as NAME.FIELD"),
        ({"a": "x", "b": 3}, "a holds text\n  b holds numbers"),
        ({"a": None, "b": [1]}, "a holds nothing\n  b holds lists"),
    ],
)  # fmt: skip
def test_columns_of_no_known_name_are_described(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownData) as refused:
        inspect_file(_lines(tmp_path / "rows.jsonl", [row] * 3), None)
    assert str(refused.value).endswith(f"\n  {said}")


def test_a_file_without_rows_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n")
    with pytest.raises(UnknownData, match="it has no rows"):
        inspect_file(path, None)


def test_messages_in_map_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "maps.parquet"
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    rows = [[tuple(turn.items()) for turn in _turns(f"a{number}", "b")] for number in range(3)]
    twice = [[("role", "user"), ("role", "user"), ("content", "a")]]
    pq.write_table(pa.table({"messages": pa.array([*rows * 4, twice], kind)}), path)
    found, _ = inspect_file(path, None)
    assert found.content == "demonstrations"
    assert found.problems["a value that cannot be read"] == 1


def test_bytes_are_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "bytes.parquet"
    pq.write_table(pa.table({"prompt": [b"a", b"b"], "response": [b"c", b"d"]}), path)
    with pytest.raises(UnknownData, match="bytes are not text; write the column as strings in UTF-8"):
        inspect_file(path, None)


def _recipe(source: Path) -> str:
    """Return the source as a recipe that names it is resolved to."""
    data = f"data: {{d: {{source: '{source}'}}}}\nstages: {{s: {{kind: sft, data: d}}}}"
    return parse_recipe(f"recipe: x\nmodel: {{source: 'builtin:tiny'}}\n{data}").data["d"].source


def _refused(source: Path) -> tuple[str, str]:
    with pytest.raises(UnknownData) as inspected:
        inspect_file(source, None)
    with pytest.raises(RecipeError) as loaded:
        _recipe(source)
    return str(inspected.value), str(loaded.value)


def test_a_folder_of_save_to_disk_is_its_files(tmp_path: Path) -> None:
    """The folder is as the library writes it, in several files and with a selection of rows."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": f"a{number}", "response": "b"} for number in range(9)])
    rows.select([8, 3, 5, 0, 7]).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    found, first = inspect_file(tmp_path / "saved", None)
    assert found.num_usable == 5
    assert found.recipe == f"data:\n  saved:\n    source: {tmp_path / 'saved'}\n"
    assert [row["prompt"] for _, row in first] == ["a8", "a3", "a5", "a0", "a7"]
    assert _recipe(tmp_path / "saved") == str(tmp_path / "saved" / "data-*.arrow")


def test_of_several_splits_one_is_to_be_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "a", "response": "b"}])
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(folder))
    for said in _refused(folder):
        assert f"it holds the splits test, train; name the folder of one, {folder / 'test'}" in said
    assert inspect_file(folder / "train", None)[0].num_usable == 1


def test_what_was_written_over_another_dataset_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": f"a{number}", "response": "b"} for number in range(9)])
    rows.save_to_disk(str(tmp_path), num_shards=3)
    rows.select([1]).save_to_disk(str(tmp_path))
    assert len(list(tmp_path.glob("data-*.arrow"))) == 4, "of both"
    for said in _refused(tmp_path):
        assert "its state.json lists other files than data-*.arrow; write it again" in said
