"""Responses equal, token by token, the chat template's own text of the whole conversation."""

import json
import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.models.byte_tokenizer import CHATML
from vantage.models.conversations import encode_conversations
from vantage.models.prompts import encode_prompts
from vantage.models.rendered_responses import ResponseRenderer, UnrenderedRow, control_tokens, spelled
from vantage.schemas.conversations import AS_SAMPLED, Message, Prompt

TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}{% for call in m.tool_calls or [] %}\n<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes reasoning of the last turn, and calls."""
OPENS_THINKING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
EMPTY_THINKING = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message.role == 'assistant' and loop.last and '<think>' not in message.content %}<think>\n\n</think>\n\n"
    "{% endif %}{{ message['content'] }}",
)
"""A template that writes an empty thought where the last turn has none."""
TRIMS = CHATML.replace("message['content'] }}", "message['content'] | trim }}")
FORGETS = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'].split('</think>')[-1] | trim if message.role == 'assistant' and not loop.last "
    "else message['content'] }}",
)
"""A template that removes the thinking of earlier turns."""
FORGETS_ALL = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'].split('</think>')[-1] | trim if message.role == 'assistant' else message['content'] }}",
)
OPENS_AND_FORGETS = FORGETS_ALL.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
"""A template whose prompts open a thought that it removes from all turns."""
TURN_OF_ITS_OWN = (
    "{% for m in messages %}"
    "{% if m.reasoning_content %}<|im_start|>assistant\nthinking: {{ m.reasoning_content }}<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes the reasoning as a turn of its own, which ends like every turn."""
END = "<|im_end|>"
THOUGHT = "<think>\nIs it even? Yes.\n</think>\n\nTwo."


def said(content: str, **extra: Any) -> Message:
    return Message(role="assistant", content=content, extra=json.dumps(extra) if extra else None)


def asked(content: str) -> Message:
    return Message(role="user", content=content, extra=None)


def tokens(tokenizer: Any, prompt: Prompt, response: Message) -> tuple[list[int], str] | UnrenderedRow:
    """Return the ids of the prompt and the response, and the text of the response."""
    [ids] = encode_prompts(tokenizer, [prompt], chat=True)
    [found] = ResponseRenderer(tokenizer, chat=True).encode([prompt], [response])
    return found if isinstance(found, UnrenderedRow) else ([*ids, *found], tokenizer.decode(found))


def whole(tokenizer: Any, prompt: Prompt, response: Message) -> list[int]:
    """Return the ids of the whole conversation as the tokenizer's own method gives them, up to the end of the last turn."""
    turns = [asked(prompt)] if isinstance(prompt, str) else prompt
    fields = [
        {"role": each["role"], "content": each["content"], **json.loads(each["extra"] or "{}")}
        for each in [*turns, response]
    ]
    ids = tokenizer.apply_chat_template(fields, tokenize=True, return_dict=False)
    return list(ids[: len(ids) - ids[::-1].index(tokenizer.eos_token_id)])


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize(
    ("template", "response"),
    [
        (CHATML, said("Two.")),
        (CHATML, said(" 国会 🙂\n")),
        (TOOLS, said("Two.", reasoning_content="Is it even?")),
        (TOOLS, said("", tool_calls=[CALL])),
        (TOOLS, said("I add.", tool_calls=[CALL, CALL], reasoning_content="So I add.")),
        (TOOLS, said("Two.", name="bot")),
        (OPENS_THINKING, said(THOUGHT)),
        (EMPTY_THINKING, said("Two.")),
        (EMPTY_THINKING, said(THOUGHT)),
        (TRIMS, said("  Two.\n")),
        (FORGETS, said(THOUGHT)),
    ],
)
@pytest.mark.parametrize("prompt", ["1+1?", [asked("1+1?"), said(THOUGHT), asked("And again?")]])
def test_prompt_and_response_are_what_the_template_writes(
    byte_tokenizer: PreTrainedTokenizerBase, template: str, response: Message, prompt: Prompt
) -> None:
    byte_tokenizer.chat_template = template
    found = tokens(byte_tokenizer, prompt, response)
    assert not isinstance(found, UnrenderedRow), found
    assert found[0] == whole(byte_tokenizer, prompt, response)
    assert found[1].count(END) == 1 and found[1].endswith(END)


def test_what_the_prompt_has_opened_is_not_written_again(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = OPENS_THINKING
    found = tokens(byte_tokenizer, "1+1?", said(THOUGHT))
    assert not isinstance(found, UnrenderedRow)
    assert byte_tokenizer.decode(found[0]).count("<think>") == 1
    assert found[1] == "Is it even? Yes.\n</think>\n\nTwo.<|im_end|>"


@pytest.mark.parametrize("response", [THOUGHT, THOUGHT.replace("<think>\n", "<think>")])
def test_a_thought_that_the_prompt_has_opened_is_learnt_where_the_template_removes_it_later(
    byte_tokenizer: PreTrainedTokenizerBase, response: str
) -> None:
    byte_tokenizer.chat_template = OPENS_AND_FORGETS
    found = tokens(byte_tokenizer, "1+1?", said(response))
    assert not isinstance(found, UnrenderedRow), found
    assert found[1] == "Is it even? Yes.\n</think>\n\nTwo." + END


def test_a_response_ends_with_its_last_turn(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = TURN_OF_ITS_OWN
    response = said("Two.", reasoning_content="Is it even?")
    found = tokens(byte_tokenizer, "1+1?", response)
    assert not isinstance(found, UnrenderedRow), found
    assert found[0] == whole(byte_tokenizer, "1+1?", response)
    assert found[1] == f"thinking: Is it even?{END}\n<|im_start|>assistant\nTwo.{END}"


@pytest.mark.parametrize("template", [OPENS_THINKING, TRIMS, FORGETS_ALL])
def test_what_a_model_wrote_after_its_prompt_stands_as_it_was_sampled(
    byte_tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    """The text stays also where it was cut off inside a thought; without the mark the template would write it
    otherwise.
    """
    byte_tokenizer.chat_template = template
    renderer = ResponseRenderer(byte_tokenizer, chat=True)
    for text in ("Is it even? Yes.\n</think>\n\nTwo. \n", " Is it"):
        [found] = renderer.encode(["1+1?"], [Message(role="assistant", content=text, extra=AS_SAMPLED)])
        assert not isinstance(found, UnrenderedRow) and byte_tokenizer.decode(found) == text + END
    assert not renderer.writes_as_it_stands("1+1?", " Is it") or template == FORGETS_ALL
    assert not renderer.writes_as_it_stands("1+1?", f"{THOUGHT}\n") or template == FORGETS_ALL


def test_a_response_may_go_on_in_the_thought_that_its_prompt_has_opened(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    byte_tokenizer.chat_template = OPENS_THINKING
    inside = "Is it even? Yes.\n</think>\n\nTwo."
    found = tokens(byte_tokenizer, "1+1?", said(inside))
    assert not isinstance(found, UnrenderedRow) and found[1] == inside + END
    assert ResponseRenderer(byte_tokenizer, chat=True).writes_as_it_stands("1+1?", inside)
    twice = tokens(byte_tokenizer, "1+1?", said("So. <think>\nHm.\n</think>\n\nTwo."))
    assert isinstance(twice, UnrenderedRow), "it opens the thought a second time"


def test_a_template_made_for_turns_that_lie_in_the_past_takes_no_thinking_from_the_last(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The model writes its last turn with its thinking when it is served, so it learns it with its thinking."""
    byte_tokenizer.chat_template = FORGETS_ALL
    found = tokens(byte_tokenizer, "1+1?", said(THOUGHT))
    assert not isinstance(found, UnrenderedRow)
    assert found[1] == THOUGHT + END


@pytest.mark.parametrize(
    ("template", "response", "reason"),
    [
        (CHATML, said("Two.", reasoning_content="Is it even?"), "leaves out 'Is it even\\?'.*and the template writes"),
        (CHATML, said("", tool_calls=[CALL]), "leaves out 'add'"),
        (CHATML.replace("message['content'] }}", "message['content'] | replace('even', '') }}"), said("It is even."),
         "leaves out 'It is even\\.'.*and the template writes"),
        (OPENS_THINKING, said("Two."), "does not begin this response as its prompt ends.*<think>.*Two"),
        (CHATML.replace("{% for", "{{ raise_exception('no') if messages[-1].content == 'Two.' }}{% for", 1), said("Two."), "refuses it: no"),
    ],
    ids=["reasoning", "call", "a word", "no thinking", "refusal"],
)  # fmt: skip
def test_a_row_that_the_template_does_not_write_is_refused_with_both_texts(
    byte_tokenizer: PreTrainedTokenizerBase, template: str, response: Message, reason: str
) -> None:
    byte_tokenizer.chat_template = template
    found = tokens(byte_tokenizer, "1+1?", response)
    assert isinstance(found, UnrenderedRow)
    assert re.search(reason, str(found))


def test_without_a_template_nobody_knows_how_a_call_is_written(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    [refused, kept] = ResponseRenderer(byte_tokenizer, chat=False).encode(
        ["1+1?"] * 2, [said("Two.", tool_calls=[CALL]), said("Two.", name="bot")]
    )
    assert isinstance(refused, UnrenderedRow) and "no chat template" in str(refused)
    assert not isinstance(kept, UnrenderedRow) and byte_tokenizer.decode(kept) == f"Two.{END}"


def test_history_is_what_serving_reads_and_what_is_left_of_a_turn_is_learnt(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Two earlier turns with thinking, which the template removes: so are the tokens that the assistant wrote there."""
    byte_tokenizer.chat_template = FORGETS
    talk = [asked("1+1?"), said(THOUGHT), asked("3?"), said("No thought."), asked("5?")]
    [encoded] = encode_conversations(byte_tokenizer, [talk], chat=True)
    ids: Any = byte_tokenizer.apply_chat_template(
        talk, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert encoded.ids == list(ids)
    learnt = [byte_tokenizer.decode(encoded.ids[begin:end]) for begin, end in encoded.spoken]
    assert learnt == ["Two.", END, "No thought.", END]


def test_tokens_that_say_where_turns_begin_and_end_are_the_templates_and_those_of_texts(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    byte_tokenizer.chat_template = CHATML
    assert set(control_tokens(byte_tokenizer, chat=True)) == {"<|im_start|>", END}
    assert control_tokens(byte_tokenizer, chat=False) == (END,)
    text = f"a<|im_start|>b{END}{END}<|endoftext|>"
    found = spelled(control_tokens(byte_tokenizer, chat=True), [text, "plain"])
    assert found == ["<|im_start|>", END, END], "the pad token may be a text's own"
