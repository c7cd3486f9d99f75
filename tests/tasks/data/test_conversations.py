"""Conversations are read in the layouts that people publish; the rows are written by hand."""

import json
from typing import Any

import pytest

from vantage.schemas.conversations import Message, first_words, transcript
from vantage.tasks.data.conversations import common_beginning, read_conversation, read_history

HH = "\n\nHuman: How tall\n\nis it?\n\nAssistant: 300 m.\n\nHuman: And the other?\n\nAssistant:"


def message(role: str, content: str, extra: str | None = None) -> Message:
    return Message(role=role, content=content, extra=extra)


@pytest.mark.parametrize(
    "value",
    [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        [{"role": "prompter", "text": "a"}, {"role": "Model", "text": "b"}],
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": ["b"]},
        ],
        {"id": 3, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "\n\nHuman: a\n\nAssistant: b",
        "Human: a\n\nAssistant: b ",
    ],
)
def test_every_layout_gives_the_same_messages(value: Any) -> None:
    assert read_conversation(value) == [message("user", "a"), message("assistant", "b")]


def test_a_transcript_may_have_blank_lines_in_its_turns_and_end_where_the_answer_begins() -> None:
    assert read_conversation(HH) == [
        message("user", "How tall\n\nis it?"),
        message("assistant", "300 m."),
        message("user", "And the other?"),
    ]


def test_calls_of_tools_are_kept_for_the_template() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    [asked, called, answered] = read_conversation(
        [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "4"},
        ]
    )
    assert (asked["extra"], called["content"], answered["role"]) == (None, "", "tool")
    assert json.loads(called["extra"] or "") == {"tool_calls": [call]}
    assert json.loads(answered["extra"] or "") == {"name": "add"}
    [sharegpt] = read_conversation(
        [{"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}]
    )
    assert (sharegpt["role"], json.loads(sharegpt["extra"] or "")) == ("assistant", {"tool_calls": [call]})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("2+2?", "does not begin with Human: or System:"),
        ([], "type list is not a conversation"),
        ([{"content": "a"}], "names its author in role or from; this one has content"),
        ([{"role": "narrator", "content": "a"}], "a message is by 'narrator'"),
        ([{"role": "user", "content": None}], "has its text in content, value or text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "parts that are no text"),
        ([{"from": "function_call", "value": "add(2)"}], "whose text is not JSON"),
    ],
)
def test_what_is_no_conversation_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_conversation(value)


def test_history_is_pairs() -> None:
    """LLaMA-Factory's ``history`` is a list of pairs: a turn of the user and one of the assistant."""
    assert read_history([["a", "b"]]) == [message("user", "a"), message("assistant", "b")]
    with pytest.raises(ValueError, match="list of pairs"):
        read_history([["a"]])


def test_what_two_conversations_have_in_common_ends_with_a_question() -> None:
    talk = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    one, other = [*talk, message("assistant", "d")], [*talk, message("assistant", "e")]
    assert common_beginning(one, other) == talk
    assert common_beginning([*talk[:2], message("user", "x")], one) == talk[:1]


def test_a_conversation_is_known_by_its_first_question() -> None:
    talk = [message("system", "s"), message("user", "a"), message("assistant", "b"), message("user", "c")]
    assert first_words(talk) == "a"
    assert transcript(talk) == "System: s\n\nUser: a\n\nAssistant: b\n\nUser: c"
