"""Inspection counts as usable what preparation keeps, and gives the same reason for every other row."""

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.inputs import Content, Data, Generation
from vantage.schemas.recipe.work import PrepareData
from vantage.schemas.records.inspection import FileInspection
from vantage.schemas.records.job import StageJob
from vantage.schemas.row_rules import BadRow, Report, UnusableTable
from vantage.tasks.data.columns import MissingColumn
from vantage.tasks.data.inspection import UnknownData, inspect_file
from vantage.tasks.prepare_data import UnusableData, keep_usable, read_file


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(source: Path, content: Content, scratch: Path) -> tuple[Report, list[dict[str, Any]]]:
    """Return what the preparation of data reports of a file, and the rows that it keeps."""
    scratch.mkdir()
    data = Data(source=str(source))
    job = StageJob(
        run_id="0001-test",
        name="data.mine",
        attempt=1,
        stage_key="0" * 64,
        seed=0,
        work=PrepareData(content=content, data=data),
        generation=Generation(),
        scratch=scratch,
        output=scratch,
    )
    with read_file(data, content, job) as (_, batches):
        rows, report = keep_usable(batches, job.work, scratch)
    return report, [row for batch in rows.batches(rows.schema.names) for row in batch.to_pylist()]


def alike(found: FileInspection, report: Report, kept: list[dict[str, Any]]) -> None:
    assert (found.num_rows, found.num_usable) == (report.num_rows, len(kept))
    assert found.problems == report.dropped
    assert found.first_problems == tuple(map(str, report.first))
    assert found.num_prompts == len({row["prompt"] for row in kept})


def pair(n: int, **other: Any) -> dict[str, Any]:
    return {"prompt": f"问 {n}", "chosen": "good", "rejected": "bad", "margin": 1.0, **other}


def ranked(n: int, **other: Any) -> dict[str, Any]:
    return {"prompt": f"问 {n}", "responses": ["a", "b"], "ranks": [1, 2], **other}


FAULTY: dict[Content, list[tuple[Any, str]]] = {
    "preferences": [
        (pair(0, prompt=None), "prompt is missing"),
        (pair(1, chosen=" \n"), "chosen is empty"),
        (pair(2, chosen="a\0b"), "chosen holds a NUL byte"),
        (pair(3, chosen="bad"), "chosen equals rejected"),
        (pair(4, margin=-1), "margin is negative or not finite"),
        (pair(5, rejected=7), "rejected: a value of type int is not text"),
        (pair(6, prompt="\ud800"), "prompt: half of a character (a lone surrogate) is not text"),
        (pair(1_000), "repeats an earlier row"),
        ("no object", "not an object {column: value}"),
    ],
    "rankings": [
        (ranked(0, responses=None), "responses are missing"),
        (ranked(1, ranks=None), "ranks are missing"),
        (ranked(2, responses=["a"], ranks=[1]), "there are fewer than two responses"),
        (ranked(3, responses=["a", None]), "a response is missing"),
        (ranked(4, responses=["a", " "]), "a response is empty"),
        (ranked(5, responses=["a", "\0"]), "a response holds a NUL byte"),
        (ranked(6, ranks=[1, 2, 3]), "responses and ranks differ in number"),
        (ranked(7, ranks=[1, None]), "a rank is missing or not finite"),
        (ranked(8, ranks=[2, 2]), "all ranks are equal, so nothing is ranked"),
        (ranked(9, responses=["a", "a"]), "one response has two ranks"),
    ],
    "demonstrations": [
        ({"prompt": "q", "response": ""}, "response is empty"),
        ({"prompt": "q"}, "response is missing"),
        ({"prompt": "", "response": "a"}, "prompt is empty"),
    ],
    "prompts": [({"prompt": "\0"}, "prompt holds a NUL byte"), ({"prompt": " "}, "prompt is empty")],
}
GOOD: dict[Content, list[Any]] = {
    "preferences": [pair(1_000 + n) for n in range(200)],
    "rankings": [ranked(1_000 + n) for n in range(200)],
    "demonstrations": [{"prompt": f"{n}", "response": "a"} for n in range(200)],
    "prompts": [{"prompt": f"{n}"} for n in range(200)],
}


@pytest.mark.parametrize("content", FAULTY)
def test_one_row_of_every_fault_is_told_alike(tmp_path: Path, content: Content) -> None:
    faulty = FAULTY[content]
    path = lines(tmp_path / "rows.jsonl", [*GOOD[content], *(row for row, _ in faulty)])
    found, rows = inspect_file(path, content)
    report, kept = prepared(path, content, tmp_path / "scratch")
    alike(found, report, kept)
    assert found.num_usable == 200 and [number for number, _ in rows] == list(range(200))
    assert found.problems == {reason: 1 for _, reason in faulty}
    wanted = [f"row {200 + i}: {reason}" for i, (_, reason) in enumerate(faulty)]
    assert [": ".join(said.split(": ")[:-1]).startswith(want) for said, want in
            zip(found.first_problems, wanted, strict=True)] == [True] * len(wanted)  # fmt: skip


def test_faults_are_shown_before_what_is_left_out_without_blame(tmp_path: Path) -> None:
    votes = [
        {"prompt": f"{n}", "response_a": "a", "response_b": "b", "label": "tie" if n < 50 else "A"}
        for n in range(100)
    ]
    path = lines(tmp_path / "votes.jsonl", [*votes, votes[60], {**votes[70], "prompt": None}])
    found, _ = inspect_file(path, None)
    report, kept = prepared(path, "preferences", tmp_path / "scratch")
    alike(found, report, kept)
    assert found.problems == {
        "neither response is preferred": 50,
        "repeats an earlier row": 1,
        "prompt is missing": 1,
    }
    assert [bad.row for bad in report.first] == [*range(9), 101]
    assert isinstance(report.first[-1], BadRow) and report.first[-1].reason == "prompt is missing"


def test_a_file_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"prompt": " ", "response": "a"}] * 20)
    with pytest.raises(UnknownData, match="no row can be used as one of demonstrations: 20 of 20 rows"):
        inspect_file(path, "demonstrations")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", " ", "\0", "a", "b", "A", "tie", "Human: a", "\n\nHuman: q\n\nAssistant: r", "中"])
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "tool_calls"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
COLUMNS = ("prompt", "response", "chosen", "rejected", "margin", "responses", "ranks", "answer",
           "messages", "label", "response_a", "response_b", "scores", "system", "tools")  # fmt: skip
HOSTILE = st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=6)
ROWS = st.lists(
    HOSTILE | st.sampled_from([row for rows in FAULTY.values() for row, _ in rows]), min_size=1, max_size=12
)


@pytest.mark.parametrize("place", [0, 75, 150])
def test_a_column_that_only_a_wrong_row_has_does_not_refuse_the_file(tmp_path: Path, place: int) -> None:
    rows: list[Any] = [pair(n) for n in range(150)]
    rows.insert(place, {"prompt": "P", "chosen": [], "rejected": "bad", "margin": 1.0, "system": "S"})
    path = lines(tmp_path / "rows.jsonl", rows)
    found, _ = inspect_file(path, "preferences")
    report, kept = prepared(path, "preferences", tmp_path / "scratch")
    assert (found.num_usable, len(kept), sum(found.problems.values())) == (150, 150, 1)
    alike(found, report, kept)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data(), content=st.sampled_from(list(FAULTY)), hostile=ROWS)
def test_rows_at_random_are_usable_for_both_or_for_neither(
    data: st.DataObject, content: Content, hostile: list[Any]
) -> None:
    good = GOOD[content][: data.draw(st.sampled_from([0, 150, 150, 150]), label="good rows")]
    with tempfile.TemporaryDirectory() as folder:
        rows = [*good, *hostile]
        Random(data.draw(st.integers(0, 2**32), label="order")).shuffle(
            rows
        )  # a draw for each place takes longer
        path = lines(Path(folder) / "rows.jsonl", rows)
        try:
            found, _ = inspect_file(path, content)
        except UnknownData:  # preparation then reads the file as our own columns, or refuses it in words
            event("refused")
            with suppress(UnusableTable, UnusableData, MissingColumn):
                prepared(path, content, Path(folder) / "scratch")
            return
        report, kept = prepared(path, content, Path(folder) / "scratch")
        alike(found, report, kept)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("data-1.jsonl", "data_1"),
        ("My file (2).jsonl", "my_file_2"),
        ("2024.jsonl", "rows"),
        ("Ünï.jsonl", "uni"),
        ("数据.jsonl", "rows"),
        ("part-*.jsonl", "part"),
        ("*.jsonl", "rows"),
        ("true.jsonl", "true"),
        ("x" * 90 + ".jsonl", "x" * 63),
    ],
)
def test_a_recipe_accepts_the_printed_entry_whatever_the_file_is_called(
    tmp_path: Path, file: str, name: str
) -> None:
    written = tmp_path / file.replace("*", "part-0")
    written.write_text('{"prompt": "a", "response": "b"}\n')
    found, _ = inspect_file(tmp_path / file, None)
    stages = f"stages: {{s: {{kind: sft, data: {name!r}}}}}"
    recipe = parse_recipe(f"recipe: x\nmodel: {{source: 'builtin:tiny'}}\n{found.recipe}{stages}")
    assert recipe.data[name].source == str(tmp_path / file)
