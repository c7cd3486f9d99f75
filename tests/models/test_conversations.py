"""Conversations of several turns equal, token by token, the whole text that the template makes."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from vantage.models.conversations import encode_conversations
from vantage.models.prompts import encode_prompts, encode_responses
from vantage.schemas.conversations import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
)
TWICE = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def turn(role: str, content: str) -> Message:
    return Message(role=role, content=content, extra=None)


TALK = [
    turn("system", "Be brief."),
    turn("user", "2+2?"),
    turn("assistant", "It is 4."),
    turn("user", "国会? <b>"),
    turn("assistant", "在\n\nhere 🙂"),
    turn("user", "Thanks, and?"),
]


def with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [CHATML, MISTRAL])
def test_the_ids_are_those_of_the_whole_text(byte_tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    tokenizer = with_template(byte_tokenizer, template)
    [encoded] = encode_conversations(tokenizer, [TALK], chat=True)
    whole: Any = tokenizer.apply_chat_template(
        TALK, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert encoded.ids == list(whole)
    assert encode_prompts(tokenizer, [TALK, "2+2?", TALK[:2]], chat=True)[0] == encoded.ids


@pytest.mark.parametrize("template", [CHATML, MISTRAL, None])
def test_what_the_assistant_said_is_what_it_would_have_been_trained_to_say(
    byte_tokenizer: PreTrainedTokenizerBase, template: str | None
) -> None:
    tokenizer = with_template(byte_tokenizer, template)
    [encoded] = encode_conversations(tokenizer, [TALK], chat=None)
    said = [token for begin, end in encoded.spoken for token in encoded.ids[begin:end]]
    expected = encode_responses(tokenizer, ["It is 4.", "在\n\nhere 🙂"], max_tokens=99, chat=None)
    assert said == [token for ids, _ in expected for token in ids]


def test_without_a_template_each_turn_has_its_role_and_the_assistants_end(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer = with_template(byte_tokenizer, None)
    [encoded] = encode_conversations(tokenizer, [TALK[1:4]], chat=None)
    end = tokenizer.eos_token
    expected = f"User:\n2+2?\n\nAssistant:\nIt is 4.{end}\n\nUser:\n国会? <b>\n\nAssistant:\n"
    assert (
        tokenizer.decode(encoded.ids, skip_special_tokens=False).removeprefix(tokenizer.bos_token or "")
        == expected
    )


def test_special_tokens_that_the_assistant_spelled_out_stay_text(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer = with_template(byte_tokenizer, CHATML)
    talk = [turn("user", "a"), turn("assistant", "b<|im_end|>c"), turn("user", "d")]
    [encoded] = encode_conversations(tokenizer, [talk], chat=True)
    [end] = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    assert encoded.ids.count(end) == 3


def test_a_template_that_refuses_a_conversation_is_named_with_its_words(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    with pytest.raises(
        ValueError, match=r"refuses a conversation of system, user.*System role not supported"
    ):
        encode_conversations(with_template(byte_tokenizer, NO_SYSTEM + CHATML), [TALK], chat=True)
    with pytest.raises(ValueError, match="does not show each turn of the assistant once"):
        encode_conversations(with_template(byte_tokenizer, TWICE), [TALK], chat=True)


def test_tools_are_shown_by_the_template(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    listing = "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
    tokenizer = with_template(byte_tokenizer, listing + CHATML)
    tools = [{"type": "function", "function": {"name": "add"}}]
    first = Message(role="user", content="2+2?", extra=json.dumps({"tools": tools}))
    call = Message(role="assistant", content="", extra=json.dumps({"tool_calls": tools}))
    [encoded] = encode_conversations(tokenizer, [[first, call, turn("tool", "4")]], chat=True)
    assert tokenizer.decode(encoded.ids).startswith("[add]<|im_start|>user\n2+2?")
    assert encoded.spoken == []  # a turn that calls tools is not learnt


def test_a_turn_with_a_name_is_learnt_as_one_without(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = with_template(byte_tokenizer, CHATML)
    named = [Message(**{**each, "extra": json.dumps({"name": "x"})}) for each in TALK]
    [one], [other] = (encode_conversations(tokenizer, [talk], chat=True) for talk in (TALK, named))
    assert one == other
