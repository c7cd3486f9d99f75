"""Parts of earlier turns that a chat template leaves out are found, on templates whose text is known."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.models.byte_tokenizer import CHATML
from vantage.models.unwritten_turns import CALLS, TOOLS, unwritten_parts
from vantage.schemas.conversations import Message

WRITES_CALLS = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}",
)
FIRST_CALL = WRITES_CALLS.replace("in message.tool_calls or []", "in (message.tool_calls or [])[:1]")
WRITES_BOTH = "{% if tools %}{{ tools | tojson }}{% endif %}" + WRITES_CALLS
KNOWS_ONE_CALL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.function.name != 'add' or c.function.arguments.a != 1 %}{{ raise_exception('another call') }}{% endif %}"
    "{% endfor %}{% endfor %}" + CHATML
)
REFUSES = "{{ raise_exception('no') }}" + CHATML
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def turn(role: str, content: str, **extra: Any) -> Message:
    return Message(role=role, content=content, extra=json.dumps(extra) if extra else None)


def talk(*calls: dict[str, Any], tools: bool = True) -> list[Message]:
    """Return a question, calls of tools whose text names the tool too, and the result."""
    first = turn("user", "1+1?", tools=[TOOL]) if tools else turn("user", "1+1?")
    return [first, turn("assistant", "add a=1", tool_calls=list(calls)), turn("tool", "2")]


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (CHATML, talk(CALL), (TOOLS, CALLS)),
        (CHATML, [turn("user", "1+1?", tools=[TOOL])], (TOOLS,)),
        (CHATML, [turn("user", "1+1?"), turn("assistant", "2", name="bot"), turn("user", "?")], ()),
        (WRITES_CALLS, talk(CALL), (TOOLS,)),
        (WRITES_BOTH, talk(CALL, CALL), ()),
        (FIRST_CALL, talk(CALL, CALL, tools=False), (CALLS,)),
        (KNOWS_ONE_CALL, talk(CALL, tools=False), ()),
        (REFUSES, talk(CALL), ()),
        (None, talk(CALL), (TOOLS, CALLS)),
    ],
    ids=[
        "neither",
        "tools alone",
        "other fields",
        "calls",
        "both",
        "the first call",
        "another call",
        "a refusal",
        "no template",
    ],
)
def test_what_the_template_leaves_out_is_named(
    byte_tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    turns: list[Message],
    expected: tuple[str, ...],
) -> None:
    byte_tokenizer.chat_template = template
    assert unwritten_parts(byte_tokenizer, turns, chat=None) == expected


def test_without_chat_no_part_is_written(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = WRITES_BOTH
    assert unwritten_parts(byte_tokenizer, talk(CALL), chat=False) == (TOOLS, CALLS)
