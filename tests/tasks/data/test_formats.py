"""Formats that people publish are recognised from a few rows, and each row becomes ours."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tasks.data.one_row import map_row
from vantage.schemas.recipe.inputs import Data, Labels
from vantage.tasks.data.columns import MissingColumn
from vantage.tasks.data.row_faults import Fault, SourceRow
from vantage.tasks.data.row_reader import reader_of

Q, GOOD, BAD = "How much is 2+2?", "It is 4.", "No idea."
ASKED = [{"role": "user", "content": Q}]
TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}, {"from": "human", "value": Q}]
TALK_TEXT = f"User: Hi\n\nAssistant: Hello\n\nUser: {Q}"
TURNS = ["user", "assistant", "user"]


def answered(text: str) -> list[dict[str, str]]:
    return [*ASKED, {"role": "assistant", "content": text}]


def read(rows: list[dict[str, Any]], content: str, **data: Any) -> tuple[str, Any]:
    """Return the format's name, and the first row."""
    given: Iterator[SourceRow] = iter(rows)
    reader, again = reader_of(Data(source="rows.jsonl", **data), content, given)
    return reader.format.name, reader.read(next(again))


DEMONSTRATIONS: list[dict[str, Any]] = [
    {"prompt": Q, "response": GOOD},
    {"instruction": Q, "input": "", "output": GOOD},
    {"instruction": Q, "context": "", "response": GOOD, "category": "maths"},
    {"prompt": Q, "completion": GOOD},
    {"question": Q, "answer": GOOD},
    {"messages": answered(GOOD)},
    {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": GOOD}]},
    {"text": f"\n\nHuman: {Q}\n\nAssistant: {GOOD}"},
]

PREFERENCES: list[dict[str, Any]] = [
    {"prompt": Q, "chosen": GOOD, "rejected": BAD},
    {"instruction": Q, "input": "", "output": "x", "chosen": GOOD, "rejected": BAD},
    {"prompt": Q, "chosen": answered(GOOD), "rejected": answered(BAD)},
    {"chosen": answered(GOOD), "rejected": answered(BAD)},
    {"chosen": f"\n\nHuman: {Q}\n\nAssistant: {GOOD}", "rejected": f"\n\nHuman: {Q}\n\nAssistant: {BAD}"},
    {"conversations": [{"from": "human", "value": Q}], "chosen": {"from": "gpt", "value": GOOD}, "rejected": BAD},
    {"prompt": Q, "response_a": GOOD, "response_b": BAD, "label": "A"},
    {"prompt": Q, "response_a": BAD, "response_b": GOOD, "winner": "model_b"},
    {"conversation_a": answered(BAD), "conversation_b": answered(GOOD), "winner": "model_b"},
    {"prompt": Q, "responses": [GOOD, BAD], "label": ["A", "B", "A", "tie"]},
    {"instruction": Q, "completions": [{"response": BAD, "overall_score": 2}, {"response": GOOD, "overall_score": 4.5}]},
    {"prompt": Q, "response_a": GOOD, "response_b": BAD, "annotator_1": "A", "annotator_2": "B", "annotator_3": "A"},
    {"prompt": Q, "response_a": BAD, "response_b": GOOD, "annotators": {"ann": "B", "bob": "tie"}},
    {"prompt": Q, "response_a": GOOD, "response_b": BAD, "annotations": [{"by": 7, "winner": "A"}, {"by": 8, "winner": None}]},
    {"history": Q, "human_ref_A": GOOD, "human_ref_B": BAD, "labels": 1, "score_A": 9, "score_B": 2},
    {"context": ASKED, "response1": BAD, "response2": GOOD, "overall_preference": 2},
    {"context": ASKED, "response1": GOOD, "response2": BAD, "overall_preference": -1},
    {"question": {"full_text": Q, "id": "x"}, "answer_0": BAD, "answer_1": GOOD, "score_0": -0.25, "score_1": 0.25},
    {"input": {"messages": ASKED}, "preferred_output": answered(GOOD)[1:], "non_preferred_output": answered(BAD)[1:]},
    {"prompt": Q, "pos_resp": GOOD, "neg_resp": BAD},
    {"instruction": Q, "generations": [BAD, GOOD], "ratings": [1.0, 5.0]},
]  # fmt: skip


@pytest.mark.parametrize("row", DEMONSTRATIONS, ids=lambda row: "-".join(row))
def test_demonstrations(row: dict[str, Any]) -> None:
    """Demonstrations in this format become prompt and response."""
    _, made = read([row] * 3, "demonstrations")
    assert made == {"prompt": Q, "response": GOOD, "messages": None, "response_extra": None}


@pytest.mark.parametrize("row", PREFERENCES, ids=lambda row: "-".join(row))
def test_preferences(row: dict[str, Any]) -> None:
    """Preferences in this format become prompt, chosen and rejected response."""
    _, made = read([row] * 3, "preferences")
    assert (made["prompt"], made["chosen"], made["rejected"], made["messages"]) == (Q, GOOD, BAD, None)


@pytest.mark.parametrize(("labels", "best"), [([0, 1], "first"), ([1, 2], "first")])
def test_numbers_are_counted_from_where_both_stand_in_the_file(labels: list[int], best: str) -> None:
    rows = [
        {"prompt": Q, "response_0": GOOD, "response_1": BAD, "better_response_id": label} for label in labels
    ]
    _, made = read(rows, "preferences")
    assert made["chosen"] == GOOD, best


def test_a_number_that_may_mean_either_is_not_guessed() -> None:
    rows = [{"prompt": Q, "response_a": GOOD, "response_b": BAD, "label": 1}] * 3
    columns = {"prompt": "prompt", "response_a": "response_a", "response_b": "response_b", "label": "label"}
    _, made = read(rows, "preferences", columns=columns)
    assert isinstance(made, Fault) and "label '1' is not known" in made.reason
    labels = Labels(first=("0",), second=("1",))
    assert read(rows, "preferences", columns=columns, labels=labels)[1]["chosen"] == BAD


def test_graded_answers_are_ranked_the_best_first() -> None:
    row = {"prompt": Q, "responses": [BAD, GOOD, "4"], "scores": [1, 3.5, 3]}
    assert read([row] * 3, "rankings") == (
        "graded answers",
        {"prompt": Q, "responses": [BAD, GOOD, "4"], "ranks": [-1.0, -3.5, -3.0], "messages": None},
    )
    made = read([row] * 3, "preferences")[1]
    assert (made["chosen"], made["rejected"]) == (GOOD, BAD)


def test_ranks_beside_each_answer_and_a_prompt_that_is_a_transcript() -> None:
    answers = [{"answer": BAD, "rank": 2.0}, {"answer": GOOD, "rank": 1.0}, {"answer": "4", "rank": 2.0}]
    row = {"prompt": f"\n\nHuman: {Q}\n\nAssistant: ", "answers": answers}
    assert read([row] * 3, "rankings") == (
        "ranked answers",
        {"prompt": Q, "responses": [BAD, GOOD, "4"], "ranks": [2.0, 1.0, 2.0], "messages": None},
    )


def test_the_reference_answer_of_verls_prompts_is_read() -> None:
    row = {"data_source": "maths", "prompt": ASKED, "reward_model": {"ground_truth": "4", "style": "rule"}}
    assert read([row] * 3, "prompts")[1] == {"prompt": Q, "answer": "4", "messages": None}


def test_a_pattern_names_several_columns_in_the_order_of_their_names() -> None:
    row = {"prompt": Q, "score_10": 0, "score_9": 5, "answer_10": BAD, "answer_9": GOOD, "score_mean": 2}
    columns = {"prompt": "prompt", "responses": "answer_[0-9]*", "scores": "score_[0-9]*"}
    made = read([row] * 3, "rankings", columns=columns)[1]
    assert (made["responses"], made["ranks"]) == ([GOOD, BAD], [-5.0, 0.0])
    with pytest.raises(MissingColumn, match=r"columns\.label='judge_\*': there is no 'judge_\*' in the data"):
        map_row(row, {"label": "judge_*"})


def test_columns_that_nothing_is_read_from_are_known() -> None:
    rows = [{"prompt": Q, "completion": GOOD, "label": "maths", "a.b": 1}]
    reader, _ = reader_of(Data(source="rows.jsonl"), "demonstrations", iter(rows))
    assert reader.unread(list(rows[0])) == ["label", "a.b"]


def test_prompts_with_answers_and_prompts_of_conversations() -> None:
    assert read([{"question": Q, "answer": "#### 4"}] * 3, "prompts")[1] == {
        "prompt": Q,
        "answer": "#### 4",
        "messages": None,
    }
    assert read([{"messages": answered(GOOD)}] * 3, "prompts")[1]["prompt"] == Q


@pytest.mark.parametrize("content", ["demonstrations", "prompts"])
def test_a_conversation_of_several_turns_keeps_them(content: str) -> None:
    row = {"conversations": [*TALK, {"from": "gpt", "value": GOOD}]}
    _, made = read([row] * 3, content)
    assert made["prompt"] == TALK_TEXT
    assert [message["role"] for message in made["messages"]] == TURNS
    assert made.get("response", GOOD) == GOOD


def test_pairs_of_transcripts_have_their_conversation_in_common() -> None:
    begin = f"\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: {Q}\n\nAssistant: "
    _, made = read([{"chosen": begin + GOOD, "rejected": begin + BAD}] * 3, "preferences")
    assert (made["prompt"], made["chosen"], made["rejected"]) == (TALK_TEXT, GOOD, BAD)
    assert [message["role"] for message in made["messages"]] == TURNS


def test_history_and_system_stand_before_the_prompt() -> None:
    row = {"instruction": Q, "input": "", "output": GOOD, "history": [["Hi", "Hello"]], "system": "Be brief."}
    _, made = read([row] * 3, "demonstrations")
    assert made["prompt"] == f"System: Be brief.\n\n{TALK_TEXT}"
    assert [message["role"] for message in made["messages"]] == ["system", *TURNS]
    assert made["response"] == GOOD


def test_the_recipes_system_message_is_for_rows_without_one() -> None:
    rows = [
        {"messages": answered(GOOD)},
        {"messages": [{"role": "system", "content": "Own."}, *answered(GOOD)]},
    ]
    for row, expected in zip(rows, ("Be brief.", "Own."), strict=True):
        made = read([row, *rows], "demonstrations", system="Be brief.")[1]
        assert made["messages"][0] == {"role": "system", "content": expected, "extra": None}


@pytest.mark.parametrize("as_json", [False, True])
def test_the_tools_of_a_row_go_along_with_its_first_turn(as_json: bool) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"messages": answered(GOOD), "tools": json.dumps(tools) if as_json else tools}
    _, made = read([row] * 3, "demonstrations")
    assert json.loads(made["messages"][0]["extra"]) == {"tools": tools}
    without = read([row, {**row, "tools": None}, row], "demonstrations")[1]
    assert without == made


@pytest.mark.parametrize(
    ("row", "content", "said"),
    [
        ({"messages": ASKED}, "demonstrations", "does not end with the assistant's answer"),
        ({"messages": [{"role": "assistant", "content": "x"}] * 2}, "prompts", "nothing is asked"),
        ({"messages": [{"role": "assistant", "content": "x"}], "chosen": "a", "rejected": "b"}, "preferences", "nothing is asked"),
        ({"chosen": answered("a"), "rejected": [*answered("b"), *answered("c")]}, "preferences", "more than their last"),
        ({"chosen": "a", "rejected": "b"}, "preferences", "without a prompt"),
    ],
)  # fmt: skip
def test_a_row_without_the_turn_that_is_asked_for_says_so(row: Any, content: str, said: str) -> None:
    columns = {"conversation": "messages"} if "messages" in row else {}
    columns |= {column: column for column in ("chosen", "rejected") if column in row}
    _, made = read([row], content, columns=columns)
    assert isinstance(made, Fault) and said in made.reason


def test_rows_that_are_nothing_known_are_not_guessed_at() -> None:
    name, _ = read([{"prompt": Q, "response": GOOD}], "demonstrations")
    assert name == "our own columns"
    given: Iterator[SourceRow] = iter([{"headline": Q, "article": GOOD}])
    reader, rows = reader_of(Data(source="rows.jsonl"), "demonstrations", given)
    reader.read(next(rows))
    with pytest.raises(ValueError, match="there is no 'prompt' in the data; it has: article, headline"):
        reader.refuse_wrong_columns()
