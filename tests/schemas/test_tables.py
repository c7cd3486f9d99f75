"""Rows that can be used, and a report of those that cannot, on tables written by hand."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pandera.errors
import pyarrow as pa
import pytest

from schemas.tables import SCHEMAS, SLICE_ROWS, BadRow, UnusableTable, usable, validate


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows))


def pair(prompt: str | None, chosen: str | None, rejected: str | None) -> dict[str, str | None]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def kept_rows(
    *batches: pa.Table, content: str, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    kept, report = usable(batches, content=content, **options)
    rows = [row for batch in kept for row in batch.to_pylist()]
    return rows, report().dropped


BAD_PAIRS = table(
    pair("1+1?", "2", "3"),
    pair(None, "2", "3"),
    pair("1+2?", " \n", "3"),
    pair("1+3?", "4", "4"),
    pair("1+4?", "5\0", "6"),
    pair("1+1?", "2", "3"),
    pair("1+1?", "2", "4"),
    pair("你好？", "您好！🦉", "مرحبا"),
)


def test_good_rows_stay_as_they_are_and_bad_ones_are_counted_by_reason() -> None:
    rows, dropped = kept_rows(BAD_PAIRS, content="preferences")
    assert rows == [
        pair("1+1?", "2", "3"),
        pair("1+1?", "2", "4"),
        pair("你好？", "您好！🦉", "مرحبا"),
    ]
    assert dropped == {
        "prompt is missing": 1,
        "chosen is empty": 1,
        "chosen equals rejected": 1,
        "chosen holds a NUL byte": 1,
        "repeats an earlier row": 1,
    }


def test_the_report_says_which_rows_and_why() -> None:
    report = validate(BAD_PAIRS, "preferences")
    assert (report.num_rows, report.num_dropped, report.dropped_share) == (8, 5, 5 / 8)
    assert report.first == (
        BadRow(1, "prompt", "prompt is missing", "None"),
        BadRow(2, "chosen", "chosen is empty", "' \\n'"),
        BadRow(3, "chosen", "chosen equals rejected", "'4'"),
        BadRow(4, "chosen", "chosen holds a NUL byte", "'5\\x00'"),
        BadRow(5, "prompt", "repeats an earlier row", "'1+1?'"),
    )
    assert str(report).splitlines()[:3] == [
        "preferences: 5 of 8 rows are unusable",
        "  1 x prompt is missing",
        "  1 x chosen is empty",
    ]
    assert str(report).splitlines()[-1] == "  row 5: repeats an earlier row: '1+1?'"


def test_a_row_with_several_faults_is_counted_once() -> None:
    report = validate(table(pair(None, "", "")), "preferences")
    assert report.dropped == {"prompt is missing": 1}


def test_ten_bad_rows_are_shown_and_all_are_counted() -> None:
    report = validate(table({"prompt": "a"}, *({"prompt": ""} for _ in range(25_000))), "prompts")
    assert report.dropped == {"prompt is empty": 25_000}
    assert [bad.row for bad in report.first] == list(range(1, 11))


def test_repeats_are_found_across_batches_and_slices() -> None:
    first = table(*({"prompt": str(i), "response": "x"} for i in range(SLICE_ROWS + 5)))
    second = table({"prompt": "3", "response": "x"}, {"prompt": "3", "response": "y"})
    rows, dropped = kept_rows(first, second, content="demonstrations")
    assert len(rows) == SLICE_ROWS + 6
    assert dropped == {"repeats an earlier row": 1}
    assert validate([first, second], "demonstrations").first[0].row == SLICE_ROWS + 5


def test_texts_that_only_join_to_the_same_are_no_repeat() -> None:
    rows, dropped = kept_rows(
        table({"prompt": "ab", "response": "c"}, {"prompt": "a", "response": "bc"}), content="demonstrations"
    )
    assert (len(rows), dropped) == (2, {})


def test_repeats_may_be_allowed() -> None:
    twice = table({"prompt": "a"}, {"prompt": "a"})
    assert kept_rows(twice, content="prompts", allow_repeats=True) == ([{"prompt": "a"}] * 2, {})


def test_a_split_must_be_a_known_one() -> None:
    rows, dropped = kept_rows(
        table(
            {"prompt": "a", "split": "train"}, {"prompt": "b", "split": "dev"}, {"prompt": "c", "split": None}
        ),
        content="prompts",
    )
    assert rows == [{"prompt": "a", "split": "train"}]
    assert dropped == {"split is none of train, validation, test": 2}


def test_rollouts_need_finite_scores_and_may_repeat() -> None:
    rollout = {"prompt": "a", "response": "b", "score": 1.0, "num_tokens": 3}
    rows, dropped = kept_rows(
        table(
            rollout,
            rollout,
            {**rollout, "score": float("nan")},
            {**rollout, "score": float("inf")},
            {**rollout, "score": None},
            {**rollout, "num_tokens": 0},
        ),
        content="rollouts",
    )
    assert rows == [rollout, rollout]
    assert dropped == {"score is missing or not finite": 3, "num_tokens is below 1": 1}


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_other_encodings_of_text_are_text(kind: pa.DataType) -> None:
    encoded = pa.table({"prompt": pa.array(["a", "b"]).cast(kind)})
    assert kept_rows(encoded, content="prompts") == ([{"prompt": "a"}, {"prompt": "b"}], {})


def test_other_columns_pass_through() -> None:
    assert kept_rows(table({"prompt": "a", "answer": 3}), content="prompts")[0] == [
        {"prompt": "a", "answer": 3}
    ]


@pytest.mark.parametrize(
    ("rows", "content", "said"),
    [
        ([{"prompt": "a", "chosen": "b"}], "preferences",
         "preferences: there is no column rejected; there are: prompt, chosen"),
        ([{"x": 1}], "demonstrations", "demonstrations: there is no column prompt, response; there are: x"),
        ([{"prompt": 1.5}], "prompts", "prompts: column prompt is double, not text; name a column of text"),
        ([{"prompt": ["a"]}], "prompts",
         "prompts: column prompt is list<item: string>, not text; name a column of text"),
        ([{"prompt": "a", "response": "b", "score": "high", "num_tokens": 1}], "rollouts",
         "rollouts: column score is string, not numbers; name a column of numbers"),
        ([], "prompts", "prompts: there are no rows; an empty file cannot be trained on"),
    ],
)  # fmt: skip
def test_tables_of_which_nothing_can_be_used(rows: list[dict[str, Any]], content: str, said: str) -> None:
    with pytest.raises(UnusableTable) as from_usable:
        kept_rows(table(*rows), content=content)
    with pytest.raises(UnusableTable) as from_validate:
        validate(table(*rows), content)
    assert str(from_usable.value) == str(from_validate.value) == said


def test_no_batches_at_all_are_refused() -> None:
    with pytest.raises(UnusableTable, match="there are no rows"):
        kept_rows(content="prompts")


def test_a_table_of_bad_rows_only_is_refused_with_its_report() -> None:
    with pytest.raises(UnusableTable, match="1 of 1 rows are unusable\n  1 x prompt is empty"):
        kept_rows(table({"prompt": ""}), content="prompts")


@pytest.mark.parametrize(
    ("content", "row", "check"),
    [
        ("demonstrations", {"prompt": "a", "response": ""}, "response is empty"),
        ("demonstrations", {"prompt": "a\0", "response": "b"}, "prompt holds a NUL byte"),
        ("preferences", pair("a", "b", "b"), "chosen equals rejected"),
        ("prompts", {"prompt": "a", "split": "dev"}, "split is none of train, validation, test"),
        ("rollouts", {"prompt": "a", "response": "b", "score": float("inf"), "num_tokens": 1},
         "score is missing or not finite"),
        ("rollouts", {"prompt": "a", "response": "b", "score": 1.0, "num_tokens": 0}, "num_tokens is below 1"),
    ],
)  # fmt: skip
def test_the_pandera_schema_holds_the_same_rules(content: str, row: dict[str, Any], check: str) -> None:
    with pytest.raises(pandera.errors.SchemaErrors) as caught:
        SCHEMAS[content].validate(table(row), lazy=True)
    assert check in caught.value.failure_cases["check"].to_pylist()


def test_the_pandera_schema_wants_our_types() -> None:
    with pytest.raises(pandera.errors.SchemaErrors, match="prompt"):
        SCHEMAS["prompts"].validate(table({"prompt": 1}), lazy=True)


def test_memory_holds_a_slice_not_the_table() -> None:
    """32 MB of text go through in slices; a hash for each row is all that stays."""

    def batches() -> Iterator[pa.Table]:
        for start in range(0, 32_000, 1_000):
            yield table(*({"prompt": f"{i:08}" * 125} for i in range(start, start + 1_000)))

    tracemalloc.start()
    before = pa.total_allocated_bytes()
    kept, report = usable(batches(), content="prompts")
    peak_arrow = 0
    for batch in kept:
        peak_arrow = max(peak_arrow, pa.total_allocated_bytes() - before)
        del batch
    peak_python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report().num_rows == 32_000
    assert peak_arrow < 16_000_000
    assert peak_python < 32_000_000
