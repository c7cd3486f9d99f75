"""Usable rows are kept, and a report describes the others, on tables that are written by hand."""

import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pandera.errors
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.every import every
from vantage.schemas.row_rules import REPEATED, SLICE_ROWS, BadRow, Report, UnusableTable
from vantage.schemas.tables import SCHEMAS, usable_rows


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows))


def pair(prompt: str | None, chosen: str | None, rejected: str | None) -> dict[str, str | None]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def ranking(prompt: str | None, responses: Any, ranks: Any) -> dict[str, Any]:
    return {"prompt": prompt, "responses": responses, "ranks": ranks}


RANKING_TYPES = pa.schema(
    [("prompt", pa.string()), ("responses", pa.list_(pa.string())), ("ranks", pa.list_(pa.float64()))]
)


def kept_rows(
    *batches: pa.Table, content: str, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    kept, report = usable_rows(batches, content=content, **options)
    rows = [row for batch in kept for row in batch.to_pylist()]
    return rows, report().dropped


def report_of(*batches: pa.Table, content: str) -> Report:
    kept, report = usable_rows(batches, content=content)
    for _ in kept:
        pass
    return report()


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
    report = report_of(BAD_PAIRS, content="preferences")
    assert (report.num_rows, report.num_dropped) == (8, 5)
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
    report = report_of(table(pair(None, "", ""), pair("a", "b", "c")), content="preferences")
    assert report.dropped == {"prompt is missing": 1}


def test_ten_bad_rows_are_shown_and_all_are_counted() -> None:
    report = report_of(table({"prompt": "a"}, *({"prompt": ""} for _ in range(25_000))), content="prompts")
    assert report.dropped == {"prompt is empty": 25_000}
    assert [bad.row for bad in report.first] == list(range(1, 11))


def test_repeats_are_found_across_batches_and_slices() -> None:
    first = table(*({"prompt": str(i), "response": "x"} for i in range(SLICE_ROWS + 5)))
    second = table({"prompt": "3", "response": "x"}, {"prompt": "3", "response": "y"})
    rows, dropped = kept_rows(first, second, content="demonstrations")
    assert len(rows) == SLICE_ROWS + 6
    assert dropped == {"repeats an earlier row": 1}
    assert report_of(first, second, content="demonstrations").first[0].row == SLICE_ROWS + 5


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


NAN, INF = float("nan"), float("inf")


def test_rankings_are_kept_with_their_ties_and_bad_ones_counted_by_reason() -> None:
    good = [
        ranking("1+1?", ["2", "3", "zwei"], [1.0, 2.0, 1.0]),
        ranking("你好？", ["您好！🦉", "مرحبا"], [-0.5, -2.5]),
        ranking("1+1?", ["2", "3", "zwei"], [1.0, 3.0, 2.0]),  # another ranking of the same responses
        ranking("twice?", ["a", "a", "b"], [1.0, 1.0, 2.0]),  # a policy may well say the same twice
    ]
    bad = [
        (ranking(None, ["a", "b"], [1, 2]), "prompt is missing"),
        (ranking(" ", ["a", "b"], [1, 2]), "prompt is empty"),
        (ranking("p", None, [1, 2]), "responses are missing"),
        (ranking("p", ["a", "b"], None), "ranks are missing"),
        (ranking("p", [], []), "there are fewer than two responses"),
        (ranking("q", ["a"], [1]), "there are fewer than two responses"),
        (ranking("p", ["a", None], [1, 2]), "a response is missing"),
        (ranking("p", ["a", " \n"], [1, 2]), "a response is empty"),
        (ranking("p", ["a\0", "b"], [1, 2]), "a response holds a NUL byte"),
        (ranking("p", ["a", "b", "c"], [1, 2]), "responses and ranks differ in number"),
        (ranking("p", ["a", "b"], [1, None]), "a rank is missing or not finite"),
        (ranking("q", ["a", "b"], [1, NAN]), "a rank is missing or not finite"),
        (ranking("r", ["a", "b"], [INF, 1]), "a rank is missing or not finite"),
        (ranking("p", ["a", "b"], [2, 2]), "all ranks are equal, so nothing is ranked"),
        (ranking("p", ["a", "a", "b"], [1, 2, 2]), "one response has two ranks"),
        (good[1], "repeats an earlier row"),
    ]
    rows = pa.Table.from_pylist([*good, *(row for row, _ in bad)], schema=RANKING_TYPES)
    kept, dropped = kept_rows(rows, content="rankings")
    assert kept == good
    assert dropped == {reason: sum(reason == other for _, other in bad) for _, reason in bad}
    first = report_of(rows, content="rankings").first
    assert [bad_row.reason for bad_row in first] == [reason for _, reason in bad[:10]]
    assert str(first[7]) == "row 11: a response is empty: ['a', ' \\n']"


def is_good_ranking(row: dict[str, Any]) -> bool:
    """Return whether a ranking keeps the same rules, checked value by value."""
    responses, ranks = row["responses"], row["ranks"]
    if not row["prompt"] or not row["prompt"].strip() or "\0" in row["prompt"]:
        return False
    if responses is None or ranks is None or not 2 <= len(responses) == len(ranks):
        return False
    if not all(text is not None and text.strip() and "\0" not in text for text in responses):
        return False
    if not all(rank is not None and math.isfinite(rank) for rank in ranks) or min(ranks) == max(ranks):
        return False
    pairs = [(i, j) for i in range(len(ranks)) for j in range(i)]
    return not any(responses[i] == responses[j] and ranks[i] != ranks[j] for i, j in pairs)


TEXTS = st.sampled_from(["a", "b", "c", "d", "d", "é", "", " ", "x\0", None])
RANKS = st.sampled_from([1.0, 2.0, 3.0, 3.0, -1.5, NAN, INF, None])
GOOD_TEXTS, GOOD_RANKS = st.sampled_from(["a", "b", "c", "d"]), st.sampled_from([1.0, 2.0, 3.0])
RANKINGS = st.builds(
    ranking,
    st.sampled_from(["p", "q", "", None]),
    st.none() | st.lists(TEXTS, max_size=4) | st.lists(GOOD_TEXTS, min_size=2, max_size=3),
    st.none() | st.lists(RANKS, max_size=4) | st.lists(GOOD_RANKS, min_size=2, max_size=3),
)


@pytest.mark.slow
@given(st.lists(st.lists(RANKINGS, min_size=1, max_size=6), min_size=1, max_size=3))
def test_the_masks_over_rankings_agree_with_rules_row_by_row(batches: list[list[dict[str, Any]]]) -> None:
    tables = [pa.Table.from_pylist(rows, schema=RANKING_TYPES) for rows in batches]
    expected = [row for rows in batches for row in rows if is_good_ranking(row)]
    # One table of several chunks, so that rows and items are counted over their seams
    whole = pa.concat_tables(tables)
    if not expected:
        with pytest.raises(UnusableTable, match="rows are unusable"):
            kept_rows(whole, content="rankings", allow_repeats=True)
    else:
        assert kept_rows(whole, content="rankings", allow_repeats=True)[0] == expected


def test_a_list_that_is_missing_may_hide_items() -> None:
    """Arrow lets a null list span items; they belong to no row, and the rows after it keep their own."""
    items = pa.array(["", "", "a", "b"])
    responses = pa.ListArray.from_arrays(pa.array([0, 2, 4]), items, mask=pa.array([True, False]))
    rows = pa.table({"prompt": ["p", "q"], "responses": responses, "ranks": [[1, 2], [1, 2]]})
    assert kept_rows(rows, content="rankings") == (
        [ranking("q", ["a", "b"], [1.0, 2.0])],
        {"responses are missing": 1},
    )


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (pa.large_list(pa.large_string()), pa.list_(pa.int32())),
        (pa.list_(pa.string(), 2), pa.list_(pa.float32(), 2)),
    ],
)
def test_other_encodings_of_lists_are_lists(texts: pa.DataType, numbers: pa.DataType) -> None:
    encoded = pa.table(
        {
            "prompt": ["p"],
            "responses": pa.array([["a", "b"]]).cast(texts),
            "ranks": pa.array([[1, 2]]).cast(numbers),
        }
    )
    assert kept_rows(encoded, content="rankings")[0] == [ranking("p", ["a", "b"], [1.0, 2.0])]


def test_margins_are_kept_and_may_be_missing() -> None:
    rows, dropped = kept_rows(
        table(
            {**pair("a", "1", "2"), "margin": 0.5},
            {**pair("b", "1", "2"), "margin": None},
            {**pair("c", "1", "2"), "margin": -0.1},
            {**pair("d", "1", "2"), "margin": NAN},
            {**pair("e", "1", "2"), "margin": INF},
            {**pair("f", "1", "2"), "margin": 0.0},
            {**pair("a", "1", "2"), "margin": 2.0},
        ),
        content="preferences",
    )
    assert [(row["prompt"], row["margin"]) for row in rows] == [("a", 0.5), ("b", None), ("f", 0.0)]
    assert dropped == {"margin is negative or not finite": 3, "repeats an earlier row": 1}


def test_whole_margins_become_floats() -> None:
    kept, _ = usable_rows([table({**pair("a", "1", "2"), "margin": 2})], content="preferences")
    assert next(kept).schema.field("margin").type == pa.float64()


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_other_encodings_of_text_are_text(kind: pa.DataType) -> None:
    encoded = pa.table({"prompt": pa.array(["a", "b"]).cast(kind)})
    assert kept_rows(encoded, content="prompts") == ([{"prompt": "a"}, {"prompt": "b"}], {})


def test_other_columns_pass_through() -> None:
    assert kept_rows(table({"prompt": "a", "difficulty": 3}), content="prompts")[0] == [
        {"prompt": "a", "difficulty": 3}
    ]


def test_answers_are_text_and_may_be_missing() -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}, {"prompt": "c", "answer": ""}]
    assert kept_rows(table(*rows), content="prompts") == (rows, {})
    with pytest.raises(
        UnusableTable, match="prompts: column answer is int64, not text; name a column of text"
    ):
        kept_rows(table({"prompt": "a", "answer": 3}), content="prompts")


def test_an_answer_does_not_make_another_prompt() -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}]
    assert kept_rows(table(*rows), content="prompts") == (rows[:1], {REPEATED: 1})


@every(
    ("rows", "content", "said"),
    [
        ([{"prompt": "a", "chosen": "b"}], "preferences",
         "preferences: there is no column rejected; there are: prompt, chosen"),
        ([{"x": 1}], "demonstrations", "demonstrations: there is no column prompt, response; there are: x"),
        ([{"prompt": 1.5}], "prompts", "prompts: column prompt is double, not text; name a column of text"),
        ([{"prompt": ["a"]}], "prompts",
         "prompts: column prompt is list<item: string>, not text; name a column of text"),
        ([{**pair("a", "b", "c"), "margin": "wide"}], "preferences",
         "preferences: column margin is string, not numbers; name a column of numbers"),
        ([ranking("a", "b", [1])], "rankings",
         "rankings: column responses is string, not lists of text; name a column of lists of text"),
        ([ranking("a", ["b", "c"], ["1st", "2nd"])], "rankings",
         "rankings: column ranks is list<item: string>, not lists of numbers; name a column of lists of numbers"),
        ([{"prompt": "a", "responses": ["b", "c"]}], "rankings",
         "rankings: there is no column ranks; there are: prompt, responses"),
        ([], "prompts", "prompts: there are no rows; an empty file cannot be trained on"),
    ],
)  # fmt: skip
def test_tables_of_which_nothing_can_be_used(rows: list[dict[str, Any]], content: str, said: str) -> None:
    with pytest.raises(UnusableTable) as refused:
        kept_rows(table(*rows), content=content)
    assert str(refused.value) == said


def test_no_batches_at_all_are_refused() -> None:
    with pytest.raises(UnusableTable, match="there are no rows"):
        kept_rows(content="prompts")


def test_a_table_of_bad_rows_only_is_refused_with_its_report() -> None:
    with pytest.raises(UnusableTable, match="1 of 1 rows are unusable\n  1 x prompt is empty"):
        kept_rows(table({"prompt": ""}), content="prompts")


@every(
    ("content", "row", "check"),
    [
        ("demonstrations", {"prompt": "a", "response": ""}, "response is empty"),
        ("demonstrations", {"prompt": "a\0", "response": "b"}, "prompt holds a NUL byte"),
        ("preferences", pair("a", "b", "b"), "chosen equals rejected"),
        ("preferences", {**pair("a", "b", "c"), "margin": -1.0}, "margin is negative or not finite"),
        ("rankings", ranking("a", ["b", ""], [1.0, 2.0]), "a response is empty"),
        ("rankings", ranking("a", ["b", "c"], [1.0, 1.0]), "all ranks are equal, so nothing is ranked"),
        ("rankings", ranking("a", ["b", "c"], [1.0]), "responses and ranks differ in number"),
        ("prompts", {"prompt": "a", "split": "dev"}, "split is none of train, validation, test"),
    ],
)  # fmt: skip
def test_the_pandera_schema_holds_the_same_rules(content: str, row: dict[str, Any], check: str) -> None:
    with pytest.raises(pandera.errors.SchemaErrors) as caught:
        SCHEMAS[content].validate(table(row), lazy=True)
    assert check in caught.value.failure_cases["check"].to_pylist()


def test_the_pandera_schema_wants_our_types() -> None:
    with pytest.raises(pandera.errors.SchemaErrors, match="prompt"):
        SCHEMAS["prompts"].validate(table({"prompt": 1}), lazy=True)
    with pytest.raises(pandera.errors.SchemaErrors, match="ranks"):
        SCHEMAS["rankings"].validate(table(ranking("a", ["b", "c"], ["1", "2"])), lazy=True)


@pytest.mark.slow
def test_memory_holds_a_slice_not_the_table() -> None:
    """32 MB of text go through in slices; a hash for each row is all that stays."""

    def batches() -> Iterator[pa.Table]:
        for start in range(0, 32_000, 1_000):
            yield table(*({"prompt": f"{i:08}" * 125} for i in range(start, start + 1_000)))

    tracemalloc.start()
    before = pa.total_allocated_bytes()
    kept, report = usable_rows(batches(), content="prompts")
    peak_arrow = 0
    for batch in kept:
        peak_arrow = max(peak_arrow, pa.total_allocated_bytes() - before)
        del batch
    peak_python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report().num_rows == 32_000
    assert peak_arrow < 16_000_000
    assert peak_python < 32_000_000
