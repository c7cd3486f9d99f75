"""A stranger's rows are mapped to our columns, on hand-written rows in the layouts that people publish."""

from typing import Any

import pytest

from tests.tasks.data.one_row import map_row
from vantage.tasks.data.columns import MissingColumn, RowMapper, WrongValue, as_text

ALPACA = {"instruction": "Add.", "input": "2 and 3", "output": "5"}
SHAREGPT = {
    "conversations": [{"from": "human", "value": "国会在哪里？"}],
    "chosen": {"from": "gpt", "value": "在华盛顿。"},
    "rejected": {"from": "gpt", "value": "不知道。"},
}
MESSAGES = {
    "prompt": "Hi",
    "chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}],
}


def test_a_name_reads_a_column_and_a_template_joins_several() -> None:
    columns = {"prompt": "{instruction}\n{input}", "response": "output"}
    assert map_row(ALPACA, columns) == {"prompt": "Add.\n2 and 3", "response": "5"}


def test_a_line_of_a_template_that_comes_out_empty_is_left_out() -> None:
    assert map_row({**ALPACA, "input": ""}, {"prompt": "{instruction}\n{input}"}) == {"prompt": "Add."}
    assert map_row({**ALPACA, "input": None}, {"prompt": "{instruction}\n{input}"}) == {"prompt": "Add."}


def test_paths_reach_into_mappings_and_lists() -> None:
    columns = {"prompt": "conversations.0.value", "chosen": "chosen.value", "rejected": "rejected"}
    assert map_row(SHAREGPT, columns) == {
        "prompt": "国会在哪里？",
        "chosen": "在华盛顿。",
        "rejected": "不知道。",
    }


def test_a_columns_own_name_may_hold_a_dot() -> None:
    assert map_row({"a.b": "whole", "a": {"b": "inner"}}, {"prompt": "a.b"}) == {"prompt": "whole"}


def test_of_a_conversation_that_ends_with_the_assistant_the_last_content_counts() -> None:
    assert map_row(MESSAGES, {"chosen": "chosen"}) == {"chosen": "Hello!"}


def test_other_conversations_keep_who_said_what() -> None:
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3+3?"},
    ]
    assert as_text(turns) == "User: 2+2?\n\nAssistant: 4\n\nUser: And 3+3?"


def test_a_column_behind_a_wrong_value_is_found_in_the_row_all_the_same() -> None:
    mapper = RowMapper({"prompt": "p", "response": "{q}\n{r}", "system": "s"})
    mapper.map({"p": "P", "q": "Q"})  # this row lacks both other columns
    with pytest.raises(WrongValue):
        mapper.map({"p": [], "q": "Q", "s": "S"})
    assert [str(error).partition(":")[0] for error in mapper.never_found()] == ["columns.response='r'"]


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(MissingColumn, match=r"columns.prompt='question'.*it has: input, instruction, output"):
        map_row(ALPACA, {"prompt": "question"})
    with pytest.raises(MissingColumn, match=r"there is no '5' in the data; it has: items 0 to 0"):
        map_row(SHAREGPT, {"prompt": "conversations.5.value"})


def test_values_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match="type list is not text"):
        as_text([1, 2])
    with pytest.raises(ValueError, match="content, value or text; this one has role"):
        as_text({"role": "user"})
    assert as_text(3.5) == "3.5"


RANKED = {
    "question": "1+1?",
    "answers": ["2", {"role": "assistant", "content": "zwei"}, [{"from": "gpt", "value": "３"}], None],
    "meta": {"places": [1, 1.5, None, -2]},
    "gap": 2,
    "words": "none",
}


def test_responses_and_ranks_are_lists_and_a_margin_is_a_number() -> None:
    columns = {"prompt": "question", "responses": "answers", "ranks": "meta.places", "margin": "gap"}
    assert map_row(RANKED, columns) == {
        "prompt": "1+1?",
        "responses": ["2", "zwei", "３", None],
        "ranks": [1.0, 1.5, None, -2.0],
        "margin": 2.0,
    }


def test_lists_and_numbers_may_be_missing() -> None:
    columns = {"responses": "a", "ranks": "b.c", "margin": "d"}
    assert map_row({"a": None, "b": None, "d": None}, columns) == {
        "responses": None,
        "ranks": None,
        "margin": None,
    }


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"responses": "{words} {gap}"},
         r"columns.responses='\{words\} \{gap\}' is a template, which makes a text, and responses is a list of texts"),
        ({"ranks": "{gap}"}, "columns.ranks='{gap}' is a template, .* and ranks is a list of numbers"),
        ({"margin": "{gap}"}, "columns.margin='{gap}' is a template, .* and margin is a number; name a column"),
        ({"responses": "words"},
         "columns.responses='words': a value of type str is not a list; responses is a list of texts"),
        ({"ranks": "gap"}, "columns.ranks='gap': a value of type int is not a list.*of scores, .* give −score"),
        ({"ranks": "answers"}, "columns.ranks='answers': a value of type str is not a number"),
        ({"ranks": "scores"}, "there is no 'scores' in the data; .* Ranks are positions: 1 is the best"),
        ({"margin": "words"}, "columns.margin='words': a value of type str is not a number; margin is a number"),
    ],
)  # fmt: skip
def test_what_is_no_list_or_number_is_refused_with_what_it_should_be(
    columns: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        map_row(RANKED, columns)


@pytest.mark.parametrize("value", [True, "1.5"])
def test_what_only_looks_like_a_number_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match=f"a value of type {type(value).__name__} is not a number"):
        map_row({"m": value}, {"margin": "m"})
