"""Prompts that other datasets hold out are not trained on, which the rows of all sides, the report and metrics show."""

from pathlib import Path
from typing import Any

import pytest

from tests.tasks.test_mix_data import job_of
from tests.tasks.test_prepare_odd_files import lines
from vantage.schemas.recipe.inputs import Data, NearDuplicates, Shares, Split
from vantage.schemas.recipe.work import PrepareData
from vantage.schemas.records.job import StageResult
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import SPLITS, TEST, TRAIN, VALIDATION
from vantage.tasks.prepare_data import UnusableData, run

EXAM = ["今天 Hello  World?", "  what is\tnew?", "never asked"]
SHARES = Shares(validation=0.2, test=0.2)


def prepared(
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    content: Any = "prompts",
    test_sets: dict[str, Path] | None = None,
    held_out: dict[int, Path] | None = None,
    alone: bool = False,
    **data: Any,
) -> tuple[StageResult, Path]:
    folder.mkdir(parents=True)
    test_sets = test_sets or {}
    work = PrepareData(
        content=content,
        data=Data(source=str(lines(folder / "rows.jsonl", rows)), **data),
        shares=SHARES,
        alone=alone,
        test_sets=tuple(test_sets),
    )
    inputs = {
        **{f"test_set.{i}": path for i, path in enumerate(test_sets.values())},
        **{f"held_out.{place}": path for place, path in (held_out or {}).items()},
    }
    job = job_of(folder / "stage", work, name="data.mine", inputs=inputs)
    return run(job), job.output


def asked(number: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i} of {i * i}", "answer": str(i)} for i in range(number)]


@pytest.fixture
def exam(tmp_path: Path) -> Path:
    rows = [{"prompt": prompt, "answer": "x"} for prompt in EXAM]
    result, output = prepared(tmp_path / "exam", rows, split=Split(test="all"))
    assert [result.metrics[f"{side}_rows"] for side in SPLITS] == [0, 0, 3]
    assert "contaminated_rows" not in result.metrics
    return output


def test_a_test_set_has_all_rows_in_order_and_nothing_to_train_on(exam: Path) -> None:
    assert [row["prompt"] for row in read_rows(exam, TEST)] == EXAM
    assert read_rows(exam, TRAIN) == read_rows(exam, VALIDATION) == []


def test_its_prompts_are_on_no_side_of_others_whatever_their_case_and_white_space(
    tmp_path: Path, exam: Path
) -> None:
    leaks = ["今天 hello world?", "What is New?"]
    rows = [*asked(40), *({"prompt": leak, "answer": "1"} for leak in leaks)]
    split = Split(validation=0.2, test=0.2)
    _, output = prepared(tmp_path / "plain", rows, split=split)
    sides = {row["prompt"]: side for side in SPLITS for row in read_rows(output, side)}
    assert len(sides) == 42
    _, more = prepared(tmp_path / "more", [{"prompt": "Question 7  of 49"}], split=Split(test="all"))
    leaks.append("question 7 of 49")
    result, output = prepared(tmp_path / "apart", rows, split=split, test_sets={"exam": exam, "more": more})
    kept = {row["prompt"]: side for side in SPLITS for row in read_rows(output, side)}
    assert kept == {prompt: side for prompt, side in sides.items() if prompt not in leaks}
    assert result.metrics["contaminated_rows"] == 3 == result.metrics["unused_rows"]
    report = (output / "report.json").read_text()
    assert '"contaminated": 3' in report and "What is New?" in report


def test_a_number_of_rows_is_reached_without_them(tmp_path: Path, exam: Path) -> None:
    rows = [*({"prompt": prompt, "answer": "1"} for prompt in EXAM), *asked(10)]
    split = Split(validation=3, test=3)
    result, _ = prepared(tmp_path / "a", rows, split=split, test_sets={"exam": exam}, alone=True)
    assert [result.metrics[f"{side}_rows"] for side in SPLITS] == [4, 3, 3]


def test_of_a_conversation_what_was_said_first_counts(tmp_path: Path, exam: Path) -> None:
    said = [
        {"role": "user", "content": "NEVER asked"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    others = [
        [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "c"}]
        for i in range(30)
    ]
    rows = [{"messages": turns} for turns in (said, *others)]
    result, output = prepared(tmp_path / "a", rows, content="demonstrations", test_sets={"exam": exam})
    assert result.metrics["contaminated_rows"] == 1
    assert not [row for side in SPLITS for row in read_rows(output, side) if "NEVER" in row["prompt"]]


def test_a_dataset_all_of_which_is_a_test_set_is_refused(tmp_path: Path, exam: Path) -> None:
    rows = [{"prompt": prompt, "answer": "1"} for prompt in EXAM]
    with pytest.raises(UnusableData, match=r"data\.mine: every prompt occurs in a test set \(data\.exam\)"):
        prepared(tmp_path / "a", rows, test_sets={"exam": exam})


def test_near_duplicates_of_what_others_hold_out(tmp_path: Path) -> None:
    long = (
        "Natalia sold clips to 48 of her friends in April, and then half as many in May; how many, number {}?"
    )
    first = [{"prompt": long.format(i), "answer": "x"} for i in range(12, 18)]
    _, exam = prepared(tmp_path / "exam", [first[0]], split=Split(test="all"))
    others = [{"prompt": f"{i} birds of {i * 7} sing in tree {i * 11}", "answer": "x"} for i in range(60)]
    _, other = prepared(tmp_path / "other", others, split=Split(validation=0.2, test=0.2))
    held_out = [row["prompt"] for side in (VALIDATION, TEST) for row in read_rows(other, side)]
    near = [f"{prompt}!" for prompt in held_out]
    rows = [*first[1:], *({"prompt": prompt, "answer": "x"} for prompt in near), *asked(30)]
    settings = NearDuplicates(similarity=0.8, max_dropped=1.0, held_out_of=("exam", "other"))
    result, output = prepared(
        tmp_path / "mine", rows, near_duplicates=settings, test_sets={"exam": exam}, held_out={1: other}
    )
    trained = [row["prompt"] for row in read_rows(output, TRAIN)]
    assert not set(trained) & {*near, *(row["prompt"] for row in first)}
    assert result.metrics["contaminated_rows"] == 0
    assert result.metrics["near_duplicate_rows"] > 10
    report = (output / "report.json").read_text()
    assert '"held_out_of": "exam"' in report and '"held_out_of": "other"' in report
