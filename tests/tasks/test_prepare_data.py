"""Files in every format, with real people's mistakes in them, become the same rows or a clear refusal."""

import csv
import json
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vantage.schemas.recipe.inputs import (
    Data,
    Generation,
    Shares,
    Split,
)
from vantage.schemas.recipe.work import PrepareData
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.row_rules import UnusableTable
from vantage.tasks.data import arithmetic
from vantage.tasks.data.columns import MissingColumn
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import SPLITS, TRAIN, TooFewRows, side_of
from vantage.tasks.prepare_data import UnusableData, run

ROWS = [
    {"instruction": f"翻译 {n} 🙂", "input": "" if n % 2 else f"إدخال {n}", "output": f"réponse {n}"}
    for n in range(60)
]
COLUMNS = {"prompt": "{instruction}\n{input}", "response": "output"}


def prepare(folder: Path, content: Any, data: Data, **work: Any) -> tuple[StageResult, Path]:
    output, scratch = folder / "output", folder / "scratch"
    output.mkdir(parents=True)
    scratch.mkdir()
    job = StageJob(
        run_id="0001-test",
        name="data.mine",
        attempt=1,
        stage_key="0" * 64,
        seed=0,
        work=PrepareData(**{"content": content, "data": data, "alone": True, **work}),
        generation=Generation(),
        scratch=scratch,
        output=output,
    )
    return run(job), output


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".csv"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    source = write(tmp_path / f"rows{suffix}", ROWS)
    split = Split(validation=6, test=6)
    result, output = prepare(
        tmp_path / "stage", "demonstrations", Data(source=str(source), columns=COLUMNS, split=split)
    )
    rows = [row for side in SPLITS for row in read_rows(output, side)]
    expected = [
        {
            "prompt": row["instruction"] + (f"\n{row['input']}" if row["input"] else ""),
            "response": row["output"],
        }
        for row in ROWS
    ]
    assert sorted(rows, key=lambda row: row["response"]) == sorted(expected, key=lambda row: row["response"])
    assert result.metrics == {
        "train_rows": 48,
        "validation_rows": 6,
        "test_rows": 6,
        "source_rows": 60,
        "dropped_rows": 0,
        "repeated_rows": 0,
        "unused_rows": 0,
    }


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.json", ROWS)
    outputs = [
        prepare(tmp_path / name, "demonstrations", Data(source=str(source), columns=COLUMNS))[1]
        for name in ("one", "two")
    ]
    files = [{path.name: path.read_bytes() for path in output.iterdir()} for output in outputs]
    assert files[0] == files[1]


def test_preferences_of_messages_are_read(tmp_path: Path) -> None:
    rows = [
        {
            "conversations": [{"from": "human", "value": f"Frage {n}"}],
            "chosen": {"from": "gpt", "value": f"gut {n}"},
            "rejected": {"from": "gpt", "value": f"schlecht {n}"},
        }
        for n in range(40)
    ]
    source = write(tmp_path / "rows.json", rows)
    columns = {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"}
    _, output = prepare(
        tmp_path / "stage",
        "preferences",
        Data(source=str(source), columns=columns, split=Split(validation=3, test=3)),
    )
    row = read_rows(output, "train")[0]
    number = row["prompt"].split()[1]
    assert row == {"prompt": f"Frage {number}", "chosen": f"gut {number}", "rejected": f"schlecht {number}"}


RANKINGS: list[dict[str, Any]] = [
    {
        "question": f"Rang {n}?",
        "answers": [f"großartig {n} 🙂", f"سيئ {n}", f"so {n}"][: 2 + n % 2],
        "place": [1, 2.5, 1][: 2 + n % 2],
    }
    for n in range(40)
]
RANKING_COLUMNS: dict[Any, str] = {"prompt": "question", "responses": "answers", "ranks": "place"}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_rankings_of_every_format_that_has_lists_are_read(tmp_path: Path, suffix: str) -> None:
    source = write(tmp_path / f"rows{suffix}", RANKINGS)
    result, output = prepare(
        tmp_path / "stage",
        "rankings",
        Data(source=str(source), columns=RANKING_COLUMNS, split=Split(validation=3, test=3)),
    )
    rows = [row for side in SPLITS for row in read_rows(output, side)]
    expected = [
        {"prompt": row["question"], "responses": row["answers"], "ranks": list(map(float, row["place"]))}
        for row in RANKINGS
    ]
    assert sorted(rows, key=itemgetter("prompt")) == sorted(expected, key=itemgetter("prompt"))
    assert [result.metrics[f"{side}_rows"] for side in SPLITS] == [34, 3, 3]
    assert result.metrics["dropped_rows"] == 0


def test_rankings_of_messages_are_read(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": row["question"],
            "responses": [[{"role": "assistant", "content": answer}] for answer in row["answers"]],
            "ranks": row["place"],
        }
        for row in RANKINGS
    ]
    source = write(tmp_path / "rows.jsonl", rows)
    _, output = prepare(
        tmp_path / "stage", "rankings", Data(source=str(source), split=Split(validation=3, test=3))
    )
    row = read_rows(output, "train")[0]
    number = int(row["prompt"].removeprefix("Rang ").removesuffix("?"))
    assert row["responses"] == RANKINGS[number]["answers"]


def test_unusable_rankings_are_refused_with_the_first_of_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"p {n}", "responses": ["a", "b"], "ranks": [1, 1 if n == 7 else 2]} for n in range(40)
    ]
    source = str(write(tmp_path / "rows.jsonl", rows))
    with pytest.raises(
        UnusableData,
        match=r"(?s)1 of 40 rows cannot be used \(all ranks are equal, so nothing is ranked: 1\).*row 7.*\[1.0, 1.0\]",
    ):
        prepare(tmp_path / "stage", "rankings", Data(source=source))


def test_rankings_in_a_csv_are_refused_with_the_way_out(tmp_path: Path) -> None:
    source = str(
        write(tmp_path / "rows.csv", [{"prompt": "p", "responses": "['a', 'b']", "ranks": "[1, 2]"}])
    )
    with pytest.raises(UnusableData, match=r"a .csv file has no lists; convert it to .jsonl or .parquet"):
        prepare(tmp_path / "stage", "rankings", Data(source=source))


def test_scores_in_place_of_ranks_rank_the_highest_first(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}", "responses": ["a", "b"], "scores": [0.5, 2]} for n in range(40)]
    source = str(write(tmp_path / "rows.jsonl", rows))
    _, output = prepare(tmp_path / "stage", "rankings", Data(source=source))
    assert {tuple(row["ranks"]) for row in read_rows(output, TRAIN)} == {(-0.5, -2.0)}
    with pytest.raises(
        MissingColumn, match=r"it has: grades, prompt, responses. Ranks are positions: 1 is the"
    ):
        unlike = [{"prompt": f"p {n}", "responses": ["a", "b"], "grades": "0.5, 2"} for n in range(4)]
        prepare(
            tmp_path / "other",
            "rankings",
            Data(source=str(write(tmp_path / "unlike.jsonl", unlike))),
        )


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".csv"])
@pytest.mark.parametrize("mapped", [True, False])
def test_margins_are_read_where_there_are_any(tmp_path: Path, suffix: str, mapped: bool) -> None:
    margins = {n: None if n == 5 else n / 4 for n in range(40)}
    rows = [{"prompt": f"p {n}", "chosen": "a", "rejected": "b", "margin": margins[n]} for n in range(40)]
    columns: dict[Any, str] = {
        column: column for column in ("prompt", "chosen", "rejected", "margin") if mapped
    }
    _, output = prepare(
        tmp_path / "stage",
        "preferences",
        Data(source=str(write(tmp_path / f"rows{suffix}", rows)), columns=columns, split=Split(test=3)),
    )
    read = {row["prompt"]: row["margin"] for side in SPLITS for row in read_rows(output, side)}
    assert read == {f"p {n}": margin for n, margin in margins.items()}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".csv"])
@pytest.mark.parametrize("mapped", [True, False])
def test_answers_stay_with_their_prompts_on_every_side(tmp_path: Path, suffix: str, mapped: bool) -> None:
    answers = {f"p {n}": None if n % 5 == 0 else f"réponse {n} 🙂" for n in range(40)}
    named = ("question", "solution") if mapped else ("prompt", "answer")
    rows = [dict(zip(named, pair, strict=True)) for pair in answers.items()]
    columns: dict[Any, str] = {"prompt": "question", "answer": "solution"} if mapped else {}
    source = str(write(tmp_path / f"rows{suffix}", rows))
    data = Data(source=source, columns=columns, split=Split(validation=8, test=8))
    _, output = prepare(tmp_path / "stage", "prompts", data)
    by_side = {side: read_rows(output, side) for side in SPLITS}
    assert {row["prompt"]: row["answer"] for side in by_side.values() for row in side} == answers
    assert all(None in [row["answer"] for row in side] for side in by_side.values())


def test_answers_are_text_whatever_the_file_has(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}", "answer": n if n % 2 else f"{n},000"} for n in range(30)]
    (tmp_path / "rows.json").write_text(
        json.dumps([{**row, "answer": {"final": n}} for n, row in enumerate(rows)])
    )
    columns: dict[Any, str] = {"prompt": "prompt", "answer": "answer.final"}
    _, output = prepare(
        tmp_path / "stage", "prompts", Data(source=str(tmp_path / "rows.json"), columns=columns)
    )
    assert all(row["answer"] == row["prompt"].removeprefix("p ") for row in read_rows(output, "train"))


def test_prompts_without_answers_are_stored_as_ever(tmp_path: Path) -> None:
    source = str(write(tmp_path / "rows.jsonl", [{"prompt": f"p {n}"} for n in range(30)]))
    with_answers = str(
        write(tmp_path / "more.jsonl", [{"prompt": f"p {n}", "answer": "x"} for n in range(30)])
    )
    outputs = [
        prepare(tmp_path / "one", "prompts", Data(source=source))[1],
        prepare(tmp_path / "two", "prompts", Data(source=with_answers, columns={"prompt": "prompt"}))[1],
        prepare(tmp_path / "built_in", "prompts", Data(source="builtin:arithmetic/prompts", rows=30))[1],
    ]
    for output in outputs:
        assert set(read_rows(output, "train")[0]) == {"prompt"}
    files = [{path.name: path.read_bytes() for path in output.iterdir()} for output in outputs]
    assert files[0] == files[1]


def test_a_margin_that_the_mapping_leaves_out_is_not_read(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}", "chosen": "a", "rejected": "b", "margin": 1.0} for n in range(40)]
    columns: dict[Any, str] = {column: column for column in ("prompt", "chosen", "rejected")}
    _, output = prepare(
        tmp_path / "stage",
        "preferences",
        Data(source=str(write(tmp_path / "rows.jsonl", rows)), columns=columns),
    )
    assert set(read_rows(output, "train")[0]) == {"prompt", "chosen", "rejected"}


def test_unusable_rows_are_left_out_up_to_the_threshold(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}", "chosen": "a", "rejected": "a" if n < 3 else "b"} for n in range(100)]
    source = str(write(tmp_path / "rows.jsonl", rows))
    result, output = prepare(tmp_path / "lenient", "preferences", Data(source=source, max_dropped=0.03))
    assert result.metrics["dropped_rows"] == 3
    report = json.loads((output / "report.json").read_text())
    assert sum(report["dropped"].values()) == 3
    with pytest.raises(UnusableData, match=r"(?s)3 of 100 rows cannot be used .*max_dropped=0.02.*row 0"):
        prepare(tmp_path / "strict", "preferences", Data(source=source, max_dropped=0.02))


def test_repeated_rows_are_left_out_without_blame(tmp_path: Path) -> None:
    source = str(write(tmp_path / "rows.jsonl", [{"prompt": f"p {n % 50}"} for n in range(100)]))
    result, output = prepare(
        tmp_path / "stage", "prompts", Data(source=source, split=Split(validation=5, test=5))
    )
    assert result.metrics["dropped_rows"] == 50
    prompts = [row["prompt"] for side in SPLITS for row in read_rows(output, side)]
    assert len(prompts) == len(set(prompts)) == 50


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "", "is empty"),
        ("a.json", "[{", "cannot be read as .json"),
        ("a.txt", "x", "none of the suffixes .json, .jsonl, .parquet, .csv"),
        ("a.parquet", "not parquet", "cannot be read as .parquet"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UnusableData, match=message):
        prepare(tmp_path / "stage", "prompts", Data(source=str(tmp_path / name)))


def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes('[{"prompt": "é"}]'.encode("latin-1"))
    with pytest.raises(UnusableTable, match=r"1 of 1 rows are unusable\n  1 x not UTF-8\n.*\n  row 0"):
        prepare(tmp_path / "stage", "prompts", Data(source=str(tmp_path / "a.json")))


def test_a_wrong_mapping_names_the_columns_that_there_are(tmp_path: Path) -> None:
    source = str(write(tmp_path / "rows.json", ROWS))
    with pytest.raises(MissingColumn, match="'question' in the data; it has: input, instruction, output"):
        prepare(tmp_path / "one", "prompts", Data(source=source, columns={"prompt": "question"}))
    with pytest.raises(UnusableTable, match="there is no column response"):
        prepare(tmp_path / "two", "demonstrations", Data(source=source, columns={"prompt": "instruction"}))


def test_too_few_rows_for_the_splits_are_refused(tmp_path: Path) -> None:
    source = str(write(tmp_path / "rows.json", [{"prompt": "a"}, {"prompt": "b"}]))
    with pytest.raises(TooFewRows, match="give more data, or other shares"):
        prepare(tmp_path / "stage", "prompts", Data(source=source, split=Split(validation=1, test=1)))


def test_no_prompt_of_the_built_in_test_split_is_trained_on(tmp_path: Path) -> None:
    sides: dict[str, dict[str, set[str]]] = {}
    shares = Shares(validation=0.2, test=0.2)
    for content in ("demonstrations", "preferences", "prompts"):
        data = Data(source=f"builtin:arithmetic/{content}", rows=300, split=Split(validation=40, test=40))
        result, output = prepare(tmp_path / content, content, data, shares=shares)
        # of 300 rows about 180 are trained on (four standard deviations are 34), and 40 of 60 held out on each side
        assert result.metrics["train_rows"] == (300 if content == "prompts" else pytest.approx(180, abs=34))
        sides[content] = {side: {row["prompt"] for row in read_rows(output, side)} for side in SPLITS}
    trained_on = set.union(*(sides[content]["train"] for content in sides))
    assert len(sides["prompts"]["test"]) == 40
    whole = [arithmetic.demonstrations, arithmetic.preferences]
    assert not trained_on & {
        row["prompt"]
        for draw in whole
        for row in draw(seed=0, count=300)
        if side_of(row["prompt"], shares) != "train"
    }
    for side in ("validation", "test"):
        assert not trained_on & sides["prompts"][side]
    first = sides["prompts"]["test"].pop()
    assert arithmetic.verify(first, f"#{arithmetic.parse_prompt(first).answer}")
