"""Whole files in formats that people publish are prepared without any mapping in the recipe."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.test_prepare_data import prepare, write
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.schemas.recipe.inputs import Data, Split
from vantage.schemas.source_files import SourceChanged, data_limit, digest_of_files, files_of, hash_file
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.prepare_data import UnusableData, copy_sources


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [row for side in SPLITS for row in read_rows(output, side)]


def test_conversations_become_prompts_with_their_turns(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q {n}"},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": f"b {n}"},
            ][0 if n % 2 else 2 :]
        }
        for n in range(60)
    ]
    source = write(tmp_path / "rows.jsonl", rows)
    split = Split(validation=5, test=5)
    result, output = prepare(tmp_path / "stage", "demonstrations", Data(source=str(source), split=split))
    made = {row["response"]: row for row in rows_of(output)}
    assert made["b 3"]["prompt"] == "User: q 3\n\nAssistant: a\n\nUser: and?"
    assert [message["role"] for message in made["b 3"]["messages"]] == ["user", "assistant", "user"]
    assert (made["b 2"]["prompt"], made["b 2"]["messages"]) == ("and?", None)
    assert result.metrics["dropped_rows"] == 0
    report = json.loads((output / "report.json").read_text())
    assert report["format"] == {
        "name": "conversations",
        "columns": {"conversation": "messages"},
        "labels": {},
    }


def test_conversations_that_begin_alike_are_on_one_side(tmp_path: Path) -> None:
    """A conversation at several depths, as HH transcripts are: the shorter must not be in training for the longer."""
    rows = []
    for n in range(80):
        talk = [{"role": "user", "content": f"q {n}"}]
        for depth in range(3):
            talk += [{"role": "assistant", "content": f"a {depth}"}]
            rows.append({"messages": list(talk)})
            talk += [{"role": "user", "content": f"more {depth}"}]
    source = write(tmp_path / "rows.jsonl", rows)
    _, output = prepare(tmp_path / "stage", "demonstrations", Data(source=str(source), split=Split(test=0.3)))
    begins = {
        side: {
            row["messages"][0]["content"] if row["messages"] else row["prompt"]
            for row in read_rows(output, side)
        }
        for side in SPLITS
    }
    assert len(begins["test"]) > 9
    assert not begins["test"] & (begins["train"] | begins["validation"])


def test_ties_are_left_out_and_are_nobodys_fault(tmp_path: Path) -> None:
    labels = ["A", "B", "tie"]
    rows = [
        {"prompt": f"p {n}", "response_a": "good", "response_b": "bad", "label": labels[n % 3]}
        for n in range(90)
    ]
    source = write(tmp_path / "rows.csv", rows)
    result, output = prepare(tmp_path / "stage", "preferences", Data(source=str(source), max_dropped=0.0))
    assert result.metrics["dropped_rows"] == 30
    made = {row["prompt"]: (row["chosen"], row["rejected"]) for row in rows_of(output)}
    assert (len(made), made["p 0"], made["p 1"]) == (60, ("good", "bad"), ("bad", "good"))
    report = json.loads((output / "report.json").read_text())
    assert report["dropped"] == {"neither response is preferred": 30}


def test_rows_that_differ_in_an_earlier_turn_alone_are_both_kept(tmp_path: Path) -> None:
    def talk(n: int) -> list[dict[str, str]]:
        said = (("user", "hi"), ("assistant", f"{n}"), ("user", "go on"), ("assistant", "done"))
        return [{"role": role, "content": content} for role, content in said]

    others = [{"messages": [{"role": "user", "content": f"p{n}"}, talk(0)[-1]]} for n in range(40)]
    rows = [{"messages": talk(n)} for n in (0, 1, 1)] + others
    source = write(tmp_path / "rows.jsonl", rows)
    result, output = prepare(tmp_path / "stage", "demonstrations", Data(source=str(source)))
    assert result.metrics["repeated_rows"] == 1
    assert sum(row["messages"] is not None for row in rows_of(output)) == 2


def test_a_conversation_that_nobody_answers_is_that_rows_fault(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(50)
    ]
    rows[7]["messages"].pop()
    source = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        UnusableData, match="1 of 50 rows cannot be used .*does not end with the assistant's answer"
    ):
        prepare(tmp_path / "stage", "demonstrations", Data(source=str(source)))


def test_a_pattern_names_files_whose_rows_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}", "response": f"r {n}"} for n in range(60)]
    for name, part in (("b", rows[20:45]), ("a", rows[:20]), ("c", rows[45:])):
        write(tmp_path / f"part-{name}.jsonl", part)
    write(tmp_path / "other.jsonl", rows)
    split = Split(validation=5, test=5)
    whole = Data(source=str(tmp_path / "other.jsonl"), split=split)
    parts = Data(source=str(tmp_path / "part-?.jsonl"), split=split)
    (_, one), (_, several) = (
        prepare(tmp_path / name, "demonstrations", data)
        for name, data in (("one", whole), ("several", parts))
    )
    for side in SPLITS:
        assert (one / f"{side}.parquet").read_bytes() == (several / f"{side}.parquet").read_bytes()
    assert not list((tmp_path / "several" / "scratch").glob("source*"))


def test_files_of_a_pattern_that_changed_since_the_plan_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}", "response": "r"} for n in range(30)])
    files = files_of(tmp_path / "*.jsonl")
    planned = digest_of_files([hash_file(file, data_limit()) for file in files])
    copies: list[Path] = []
    copy_sources(str(tmp_path / "*.jsonl"), ".jsonl", tmp_path, copies, planned=planned)
    for copy in copies:
        copy.unlink()
    write(tmp_path / "b.jsonl", [{"prompt": "x", "response": "y"}])
    with pytest.raises(SourceChanged, match="has changed since the run was planned"):
        copy_sources(str(tmp_path / "*.jsonl"), ".jsonl", tmp_path, copies, planned=planned)


def test_a_pattern_that_matches_nothing_is_refused_when_the_recipe_is_loaded(tmp_path: Path) -> None:
    source = tmp_path / "none-*.jsonl"
    with pytest.raises(UnusableData, match="matches no file here; check the pattern"):
        prepare(tmp_path / "stage", "demonstrations", Data(source=str(source)))
    with pytest.raises(
        ValueError, match=r"there is no file that .*none-\*.jsonl matches.* correct the pattern"
    ):
        load_recipe("quickstart", [f"data.demonstrations.source={source}"])


def test_a_file_with_a_wildcard_in_its_name_is_itself(tmp_path: Path) -> None:
    (tmp_path / "a*.jsonl").write_text("")
    (tmp_path / "ab.jsonl").write_text("")
    assert files_of(tmp_path / "a*.jsonl") == [tmp_path / "a*.jsonl"]
    assert files_of(tmp_path / "?b.jsonl") == [tmp_path / "ab.jsonl"]
