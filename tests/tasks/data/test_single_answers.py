"""Single graded or marked answers are grouped as a plain dictionary of all rows groups them, in one part and in many."""

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.data.test_inspection import alike, lines, prepared
from tests.tasks.test_prepare_data import prepare
from tests.tasks.test_prepare_formats import rows_of
from vantage.schemas.loading.validation import problems_of_names
from vantage.schemas.recipe.inputs import Content, Data, Labels, Split
from vantage.schemas.row_rules import REPEATED, UNPAIRED
from vantage.tasks.data import single_answers
from vantage.tasks.data.garbled_rows import GarbledRows
from vantage.tasks.data.inspection import UnknownData, inspect_file
from vantage.tasks.data.row_faults import Fault
from vantage.tasks.data.row_reader import RowReader

Row = dict[str, Any]
SCORED = {"prompt": "prompt", "response": "response", "score": "helpfulness"}


def graded(seed: int = 0, num: int = 400) -> list[Row]:
    """Return answers to 60 prompts in any order, some alike, some prompts with one answer or equal grades."""
    draw = random.Random(seed)
    return [
        {
            "prompt": f"问 {int(draw.triangular(0, 60, 0))}",
            "response": f"answer {draw.randrange(60)}",
            "helpfulness": draw.randrange(5),
            "verbosity": 1,
        }
        for _ in range(num)
    ]


def groups(rows: list[Row], grade: str) -> dict[str, dict[tuple[str, float], None]]:
    """Return prompt → its different answers with their grades, in order."""
    found: dict[str, dict[tuple[str, float], None]] = defaultdict(dict)
    for row in rows:
        found[row["prompt"]].setdefault((row["response"], float(row[grade])))
    return found


@pytest.mark.parametrize("part_bytes", [1 << 25, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_rankings_are_those_of_a_dictionary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, part_bytes: int
) -> None:
    monkeypatch.setattr(single_answers, "PART_BYTES", part_bytes)
    rows = graded(seed)
    path = lines(tmp_path / "rows.jsonl", rows)
    report, kept = prepared(path, "rankings", tmp_path / "scratch")
    expected, alone = {}, 0
    for prompt, answers in groups(rows, "helpfulness").items():
        texts = [text for text, _ in answers]
        if len({grade for _, grade in answers}) == 1:
            alone += len(answers)
        elif len(set(texts)) == len(texts):  # otherwise one response has two ranks
            expected[prompt] = [(text, -grade) for text, grade in answers]
    made = {row["prompt"]: list(zip(row["responses"], row["ranks"], strict=True)) for row in kept}
    assert made == expected and len(kept) == len(made) > 20
    assert report.dropped.get(UNPAIRED, 0) == alone > 0
    repeats = len(rows) - sum(map(len, groups(rows, "helpfulness").values()))
    assert report.dropped.get(REPEATED, 0) == repeats > 0
    assert not list((tmp_path / "scratch").glob("single*"))
    found, _ = inspect_file(path, "rankings")
    alike(found, report, kept)
    assert found.columns == SCORED


def test_pairs_are_the_best_and_the_worst(tmp_path: Path) -> None:
    rows = graded(1)
    _, kept = prepared(lines(tmp_path / "rows.jsonl", rows), "preferences", tmp_path / "scratch")
    expected = {}
    for prompt in {row["prompt"] for row in rows}:
        answers = [row for row in rows if row["prompt"] == prompt]
        ordered = sorted(answers, key=lambda row: row["helpfulness"])  # stable: the first of equals
        best = next(row for row in answers if row["helpfulness"] == ordered[-1]["helpfulness"])
        if ordered[0]["helpfulness"] < best["helpfulness"] and best["response"] != ordered[0]["response"]:
            expected[prompt] = (best["response"], ordered[0]["response"])
    assert {row["prompt"]: (row["chosen"], row["rejected"]) for row in kept} == expected


def test_answers_to_other_turns_are_no_pair_though_their_text_is_the_same(tmp_path: Path) -> None:
    """This happens where only one of two conversations offers a tool."""

    def answer(response: str, grade: float, extra: str | None) -> Row:
        asked = [{"role": "user", "content": "q", "extra": extra}]
        return {"prompt": "q", "response": response, "messages": asked, "grade": grade}

    tool, other = '{"tools": [1]}', '{"tools": [2]}'
    rows = [answer("a", 1.0, tool), answer("b", 0.0, other), answer("c", 3.0, tool)]
    found = dict(
        single_answers.by_prompt(enumerate(rows), content="preferences", are_marks=False, folder=tmp_path)
    )
    assert set(found) == {0, 1}
    assert found[0]["chosen"] == "c" and found[0]["rejected"] == "a"  # type: ignore[index]
    assert isinstance(found[1], Fault) and found[1].reason == UNPAIRED


MARKED = [  # prompt, response, whether it is good
    ("q", "good 1", True),
    ("other", "lonely", True),
    ("q", "bad 1", False),
    ("third", "bad 3", False),
    ("q", "good 2", True),
    ("q", "bad 2", False),
    ("q", "good 3", True),
    ("third", "good 4", True),
]
PAIRS = {("q", "good 1", "bad 1"), ("q", "good 2", "bad 2"), ("third", "good 4", "bad 3")}
"""By hand: the i-th good answer with the i-th bad one; `good 3` and `lonely` are left."""


def turns(prompt: str, response: str) -> list[Row]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


@pytest.mark.parametrize(
    "layout",
    [
        lambda prompt, response, good: {"prompt": prompt, "completion": response, "label": good},
        lambda prompt, response, good: {
            "prompt": turns(prompt, response)[:1],
            "completion": turns(prompt, response)[1:],
            "label": good,
        },
        lambda prompt, response, good: {"messages": turns(prompt, response), "label": good},
        lambda prompt, response, good: {"prompt": prompt, "response": response, "is_safe": good},
        lambda prompt, response, good: {"question": prompt, "answer": response, "label": str(good)},
    ],
)
def test_marks_pair_the_good_with_the_bad(tmp_path: Path, layout: Any) -> None:
    path = lines(tmp_path / "rows.jsonl", [layout(*row) for row in MARKED])
    found, rows = inspect_file(path, None)
    assert (found.content, found.format) == ("preferences", "single answers, good or bad (KTO)")
    assert {(row["prompt"], row["chosen"], row["rejected"]) for _, row in rows} == PAIRS
    assert found.problems == {UNPAIRED: 2}
    assert {line.partition(":")[0] for line in found.first_problems} == {"row 1", "row 6"}
    with pytest.raises(GarbledRows, match="marks some of the answers as bad"):
        inspect_file(path, "demonstrations")


def test_a_file_of_marks_becomes_a_dataset_and_says_what_is_left(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q {n}", "completion": f"{mark} {n}", "label": mark == "good"}
        for mark in ("good", "bad")  # those of one prompt are far apart
        for n in range(60)
        if mark == "good" or n % 10
    ]
    source = lines(tmp_path / "rows.jsonl", rows)
    data = Data(source=str(source), split=Split(validation=5, test=5))
    result, output = prepare(tmp_path / "stage", "preferences", data)
    made = {(row["prompt"], row["chosen"], row["rejected"]) for row in rows_of(output)}
    assert made == {(f"q {n}", f"good {n}", f"bad {n}") for n in range(60) if n % 10}
    report = json.loads((output / "report.json").read_text())
    assert report["dropped"] == {UNPAIRED: 6} and result.metrics["dropped_rows"] == 6
    assert [each["row"] for each in report["first_dropped"]] == [0, 10, 20, 30, 40, 50]


def test_a_recipe_names_the_columns_and_what_the_marks_mean(tmp_path: Path) -> None:
    rows = [{"q": "q", "a": text, "thumb": thumb} for text, thumb in (("x", 7), ("y", -7), ("z", 0))]
    data = Data(
        source="rows.jsonl",
        columns={"prompt": "q", "response": "a", "label": "thumb"},
        labels=Labels(first=("7",), second=("-7",), tie=("0",)),
    )
    made = [row for _, row in RowReader(data, "preferences", rows).made(rows, tmp_path)]
    assert [getattr(row, "reason", None) for row in made] == ["neither response is preferred", None]
    assert made[1] == {"prompt": "q", "messages": None, "chosen": "x", "rejected": "y"}
    plain = {
        "data": {"mine": {"source": "rows.jsonl", "columns": {"prompt": "q", "response": "a", "score": "s"}}},
        "stages": {"reward": {"kind": "reward_model", "data": "mine"}},
    }
    assert problems_of_names(plain) == []


@pytest.mark.parametrize("content", ["preferences", "rankings"])
def test_scores_of_answers_to_different_prompts_rank_nothing(tmp_path: Path, content: Content) -> None:
    rows = [{"prompt": f"q {n}", "response": "a", "score": n} for n in range(20)]
    path = lines(tmp_path / "rows.jsonl", rows)
    assert inspect_file(path, None)[0].content == "demonstrations"
    with pytest.raises(UnknownData):
        inspect_file(path, content)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "response": " ", "helpfulness": 1}, "response is missing or empty"),
        ({"prompt": None, "response": "a", "helpfulness": 1}, "prompt is missing or empty"),
        ({"prompt": "q", "response": "a", "helpfulness": None}, "score is missing or not finite"),
        ({"prompt": "q", "response": "a", "helpfulness": "4"}, "score: a value of type str is not a number"),
    ],
)
def test_an_answer_that_cannot_be_read_is_that_rows_fault(tmp_path: Path, row: Row, reason: str) -> None:
    rows = graded(2)
    path = lines(tmp_path / "rows.jsonl", [*rows[:50], row, *rows[50:]])
    found, _ = inspect_file(path, "rankings")
    assert found.problems[reason] == 1
    assert any(line.startswith(f"row 50: {reason}") for line in found.first_problems)


def test_columns_that_single_answers_do_not_have_are_refused() -> None:
    data = Data(source="rows.jsonl", columns={**SCORED, "margin": "gap"})
    with pytest.raises(
        ValueError, match=r"columns\.margin: single answers with a score or a label have none; remove it"
    ):
        RowReader(data, "preferences", [])
