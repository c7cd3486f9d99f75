"""What a last turn of the assistant contains beside its text is kept, and distinguishes rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vantage.schemas.recipe.inputs import Content, Data
from vantage.schemas.row_rules import REPEATED, RowCheck
from vantage.tasks.data.inspection import inspect_file
from vantage.tasks.data.row_faults import Fault
from vantage.tasks.data.row_reader import RowReader

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": {"c": [1, None]}}}}
ASKED = {"role": "user", "content": "1+1?"}


def calling(**changes: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [CALL], **changes}


def made(row: dict[str, Any], content: Content = "demonstrations") -> dict[str, Any]:
    """Return the row as a file that holds it three times is read."""
    reader = RowReader(Data(source="rows.jsonl"), content, [row] * 3)
    found = reader.read(row)
    assert not isinstance(found, Fault), found
    return dict(found)


def extra(**fields: Any) -> str:
    return json.dumps(fields, ensure_ascii=False)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_a_last_turn_is_kept_by_one_name(name: str) -> None:
    row = made({"messages": [ASKED, {"role": "assistant", "content": "2", name: "Count."}]})
    assert (row["response"], row["response_extra"]) == ("2", extra(reasoning_content="Count."))


def test_a_last_turn_that_only_calls_tools_is_a_demonstration() -> None:
    row = made({"messages": [ASKED, calling()]})
    assert (row["response"], row["response_extra"]) == ("", extra(tool_calls=[CALL]))


def test_fields_of_calls_and_tools_keep_the_order_of_the_file() -> None:
    """Templates write objects as JSON in their order, and a server is given that of OpenAI's interface."""
    function = {"name": "add", "description": "adds", "arguments": {"b": 1, "a": {"z": 1, "y": 2}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
    call = {"id": "c1", "type": "function", "function": function}
    for form in (function["arguments"], json.dumps(function["arguments"])):
        called = {**call, "function": {**function, "arguments": form}}
        row = made({"messages": [ASKED, calling(tool_calls=[called])], "tools": tools})
        assert row["response_extra"] == extra(tool_calls=[call])
        assert row["messages"][0]["extra"] == extra(tools=tools)


@pytest.mark.parametrize("content", [None, "I add."])
def test_a_call_in_the_form_of_the_former_interface_is_kept(content: str | None) -> None:
    call = {"name": "add", "arguments": '{"a": 2}'}
    row = made(
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": content, "function_call": call, "tool_calls": []},
            ]
        }
    )
    expected = extra(tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}])
    assert (row["response"], row["response_extra"]) == (content or "", expected)


@pytest.mark.parametrize("empty", [[], "[]", None])
def test_no_calls_are_no_field(empty: Any) -> None:
    row = made({"messages": [ASKED, {"role": "assistant", "content": "2", "tool_calls": empty}]})
    assert row.get("response_extra") is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reasoning_details": [{"text": "Count."}]}, "reasoning in reasoning_details, which is not read"),
        ({"thinking": [{"text": "Count."}]}, "reasoning in thinking, which is not read"),
        ({"tool_calls": [{"function": {"arguments": {}}}]}, "a call of a tool that has no name"),
    ],
)
def test_what_would_be_lost_is_refused(fields: dict[str, Any], reason: str) -> None:
    reader = RowReader(
        Data(source="rows.jsonl"),
        "demonstrations",
        [{"messages": [ASKED, {"role": "assistant", "content": "2"}]}] * 3,
    )
    found = reader.read({"messages": [ASKED, {"role": "assistant", "content": "2", **fields}]})
    assert isinstance(found, Fault) and reason in str(found)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_of_pairs_too(side: str) -> None:
    """A call of tools in one side of a pair is kept with this side."""
    sides = {name: [ASKED, {"role": "assistant", "content": "2"}] for name in ("chosen", "rejected")}
    sides[side] = [ASKED, calling(content="I add.")]
    row = made(sides, "preferences")
    assert (row[side], row[f"{side}_extra"]) == ("I add.", extra(tool_calls=[CALL]))
    other = ({"chosen", "rejected"} - {side}).pop()
    assert row[f"{other}_extra"] is None


@pytest.mark.parametrize("in_history", [False, True])
def test_arguments_as_a_text_and_as_an_object_are_one_row(in_history: bool) -> None:
    function = CALL["function"]
    as_text = {**CALL, "function": {**function, "arguments": json.dumps(function["arguments"])}}
    rows = []
    for call in (CALL, as_text):
        turns = [ASKED, calling(tool_calls=[call])]
        if in_history:
            turns += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}]
        rows.append(made({"messages": turns}))
    assert rows[0] == rows[1]


def test_nulls_that_arrow_adds_are_no_fields(tmp_path: Path) -> None:
    """Calls of two rows have different arguments, and tools different fields, which Arrow adds to the others as
    nulls."""
    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("one", "two")]
    tools = [{"function": {"name": "one", "x": 1}}, {"function": {"name": "two", "y": {"z": 2}}}]
    rows = [
        {"tools": tools, "messages": [{**ASKED, "tool_calls": None}, {"role": "assistant", "content": "", "tool_calls": [call]}]}
        for call in calls
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows * 2), tmp_path / "rows.parquet")
    _, [(_, first), (_, second)] = inspect_file(tmp_path / "rows.parquet", None)
    for row, call in ((first, calls[0]), (second, calls[1])):
        assert json.loads(row["response_extra"]) == {"tool_calls": [call]}
        assert json.loads(row["messages"][0]["extra"]) == {"tools": tools}


def test_a_null_within_arguments_that_are_a_text_was_written_there() -> None:
    call = {"function": {"name": "find", "arguments": '{"unit": null}'}}
    row = made({"messages": [ASKED, calling(tool_calls=[call])]})
    assert json.loads(row["response_extra"])["tool_calls"][0]["function"]["arguments"] == {"unit": None}


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([{"function": {"name": "add", "arguments": "a=2"}}], "a text that is not JSON"),
        ([{"function": {"name": "add", "arguments": "[2]"}}], "no JSON object"),
        ("add(2)", "a text, and no JSON"),
        ([3], "no list of calls"),
    ],
)
def test_calls_that_cannot_be_read_are_a_fault_of_the_row(calls: Any, reason: str) -> None:
    good = {"messages": [ASKED, calling()]}
    reader = RowReader(Data(source="rows.jsonl"), "demonstrations", [good] * 3)
    found = reader.read({"messages": [ASKED, calling(tool_calls=calls)]})
    assert isinstance(found, Fault) and reason in found.reason


def check(rows: list[dict[str, Any]], content: str) -> dict[str, int]:
    """Return reason → rows, of the first three fields of the made rows."""
    table = pa.Table.from_pylist(rows)
    checking = RowCheck(content)
    checking.check(table)
    return dict(checking.report().dropped)


def test_an_empty_text_is_a_fault_unless_tools_are_called() -> None:
    rows = [
        {"prompt": "1?", "response": "", "response_extra": extra(tool_calls=[CALL])},
        {"prompt": "2?", "response": "", "response_extra": extra(reasoning_content="Hm.")},
        {"prompt": "3?", "response": "", "response_extra": None},
    ]
    assert check(rows, "demonstrations") == {"response is empty": 2}


def test_rows_that_differ_in_their_calls_alone_are_two_and_a_pair() -> None:
    calls = [extra(tool_calls=[{"function": {"name": name}}]) for name in ("one", "two")]
    rows = [{"prompt": "1?", "response": "I do.", "response_extra": call} for call in (*calls, calls[0])]
    assert check(rows, "demonstrations") == {REPEATED: 1}
    pair = {"prompt": "1?", "chosen": "I do.", "rejected": "I do."}
    pairs = [
        {**pair, "chosen_extra": calls[0], "rejected_extra": calls[1]},
        {**pair, "chosen_extra": calls[0], "rejected_extra": calls[0]},
    ]
    assert check(pairs, "preferences") == {"chosen equals rejected": 1}


def test_graded_answers_cannot_have_calls() -> None:
    good = {"messages": [ASKED, {"role": "assistant", "content": "2"}], "label": True}
    reader = RowReader(Data(source="rows.jsonl"), "preferences", [good] * 3)
    found = reader.read({"messages": [ASKED, calling()], "label": False})
    assert isinstance(found, Fault) and "graded answers cannot have" in found.reason
