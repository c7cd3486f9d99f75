"""With templates like published ones, what is learnt has the ids of the template's own text, or is refused.

The expected ids are those of the tokenizer's own rendering of the messages as a server would be given them.
"""

import json
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.models.byte_tokenizer import CHATML, build_byte_tokenizer
from vantage.models.conversations import encode_conversations
from vantage.models.prompts import encode_prompts, stop_token_ids
from vantage.models.rendered_responses import ResponseRenderer, UnrenderedRow, tokens_that_are_written
from vantage.schemas.conversations import AS_SAMPLED, Message

MARKERS = (
    "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "[THINK]", "[/THINK]", "<|resp|>",
    "<|/resp|>",
)  # fmt: skip
CHANNELS = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% else %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""A template that writes special tokens between prompt and words, and reads reasoning as `thinking`, as gpt-oss's
does."""
TWO_CLOSINGS = CHATML.replace("{{ message['content'] }}", "<|resp|>{{ message['content'] }}<|/resp|>")
BRACKETS = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message.content if loop.last else message.content.split('[/THINK]')[-1] }}{# [THINK] #}",
)
CLOSES_TWICE = CHATML.replace(
    "{{ message['content'] }}",
    "{{ '<|resp|>' if message.role == 'assistant' }}{{ message['content'] }}"
    "{{ '<|/resp|>' if message.role == 'assistant' }}",
).replace("assistant\n{% endif", "assistant\n<|resp|>{% endif")
"""A template that opens the response in the prompt, and closes it before the turn, as Command A's does."""
TRIMS = CHATML.replace("message['content'] }}", "message['content'] | trim }}")
THINKS = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message.role == 'assistant' and loop.last %}<think>\n{% if '</think>' in message.content %}"
    "{{ message.content.split('</think>')[0].split('<think>')[-1] | trim }}{% endif %}\n</think>\n\n"
    "{{ message.content.split('</think>')[-1].lstrip() }}{% else %}{{ message.content }}{% endif %}",
)
"""A template that writes a thought, or an empty one, before the last answer, as Qwen3's does."""
CUTS = CHATML.replace(
    "message['content'] }}", "message['content'][:2] if message.role == 'assistant' else message.content }}"
)
NO_BOLD = CHATML.replace("message['content'] }}", "message['content'] | replace('<b>', '') }}")
CLOSES_NOTHING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>\n{% endif %}"
    "{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A template that puts no token after a turn, as GLM's does."""
CALL_IF_NULL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is none %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name + ' ' + c.function.arguments }}</call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes calls only where the content is null, and adds the arguments to a text, as DeepSeek's does."""
CALLS = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for c in message.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}",
)
FIRST_CALL = CALLS.replace("in message.tool_calls or []", "in (message.tool_calls or [])[:1]")
NAME_ALONE = CALLS.replace("c.function | tojson", "c.function.name")
OPENS = CHATML.replace("assistant\n{% endif", "assistant\n<seed:think>\n{% endif")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    inner: Tokenizer = build_byte_tokenizer().backend_tokenizer
    inner.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def said(content: str, **extra: Any) -> Message:
    return Message(role="assistant", content=content, extra=json.dumps(extra) if extra else None)


def call(name: str = "add", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def learnt(tokenizer: Any, response: Message, prompt: str = "1+1?") -> list[int] | UnrenderedRow:
    [ids] = encode_prompts(tokenizer, [prompt], chat=True)
    [found] = ResponseRenderer(tokenizer, chat=True).encode([prompt], [response])
    return found if isinstance(found, UnrenderedRow) else [*ids, *found]


def served(tokenizer: Any, prompt: str = "1+1?", **turn: Any) -> list[int]:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", **turn}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


CASES: list[tuple[str, str, Message, dict[str, Any]]] = [
    (CHANNELS, "<|return|>", said("Two."), {"content": "Two."}),
    (CHANNELS, "<|return|>", said("Two.", reasoning_content="Even?"), {"content": "Two.", "thinking": "Even?"}),
    (CHANNELS, "<|return|>", said("", tool_calls=[call(a=2)]), {"content": "", "tool_calls": [call(a=2)]}),
    (TWO_CLOSINGS, "<|im_end|>", said("Two."), {"content": "Two."}),
    (CLOSES_TWICE, "<|im_end|>", said("Two."), {"content": "Two."}),
    *[
        (template, "<|im_end|>", said(text), {"content": text})
        for template in (TRIMS, THINKS)
        for text in ("It is <b>two</b>.\n", "<answer>\n2\n</answer> \n", "A List<T> of [b]x[/b].\n", "<ul><li>2</li></ul>\n")
    ],
    (THINKS, "<|im_end|>", said("<think>Is a<b> even?</think>So <i>two</i>.\n"),
     {"content": "<think>Is a<b> even?</think>So <i>two</i>.\n"}),
    (BRACKETS, "<|im_end|>", said("[THINK]Even?[/THINK]Two."), {"content": "[THINK]Even?[/THINK]Two."}),
    (CALLS, "<|im_end|>", said("I add.", tool_calls=[call(b=1, a=2)]), {"content": "I add.", "tool_calls": [call(b=1, a=2)]}),
    (CALL_IF_NULL, "<|im_end|>", said("", tool_calls=[call(b="é", a=2)]),
     {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"b": "é", "a": 2}'}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("template", "eos", "response", "turn"), CASES)
def test_the_ids_are_those_of_what_a_server_would_be_given(
    tokenizer: PreTrainedTokenizerFast, template: str, eos: str, response: Message, turn: dict[str, Any]
) -> None:
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    found, whole = learnt(tokenizer, response), served(tokenizer, **turn)
    assert not isinstance(found, UnrenderedRow), found
    assert found == whole[: len(found)]
    assert not tokenizer.decode(whole[len(found) :]).strip(), "nothing but white space follows"


def test_of_two_tokens_that_close_each_turn_sampling_stops_at_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TWO_CLOSINGS
    assert stop_token_ids(tokenizer, chat=True) == (tokenizer.eos_token_id,)


def test_a_template_that_closes_no_turn_gets_eos_behind_the_words(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CLOSES_NOTHING
    found = learnt(tokenizer, said("Two."))
    assert found == [*served(tokenizer, content="Two."), tokenizer.eos_token_id]
    thought = learnt(tokenizer, said("<|call|> means [/THINK] Two."))
    assert not isinstance(thought, UnrenderedRow)
    assert tokenizer.decode(thought).endswith(" Two.<|im_end|>"), "no token within the words ends them"


@pytest.mark.parametrize(
    ("template", "response", "reason"),
    [
        (CHATML, said("I add.", tool_calls=[call(a=2)]), "leaves out 'add'"),
        (CHATML, said("Even? Two.", reasoning_content="Even?"), "leaves out 'Even\\?'"),
        (FIRST_CALL, said("", tool_calls=[call(a=2), call(a=2)]), "leaves out 'add'"),
        (CHANNELS, said("", tool_calls=[call(a=2), call(a=3)]), "leaves out 'add'"),
        (CHANNELS, said("a", tool_calls=[call(a=2)]), "leaves out 'a'"),
        (NAME_ALONE, said("", tool_calls=[call(a=2)]), "leaves out 'a=2'"),
        (CUTS, said("1+1?"), "leaves out '1\\+1\\?'"),
        (NO_BOLD, said("It is <b>two</b>."), "leaves out 'It is <b>two"),
        (THINKS, said("<think>A</think>One.<think>B</think>Two."), "leaves out 'One.B"),
        (CHANNELS.replace("<|call|>", ""), said("", tool_calls=[call(a=2)]), "does not close the turn"),
        (CHATML.replace("['content']", "['content'] + message.seed"), said("Two."), "refuses it"),
        (CHATML.replace("['content']", "['content'] + 1"), said("Two."), "refuses it: TypeError"),
    ],
    ids=["name in the text", "thought in the text", "same call twice", "second call", "text beside a call",
         "arguments", "end of the text", "tag", "first answer", "nothing closes it", "undefined", "type"],
)  # fmt: skip
def test_a_part_that_the_template_does_not_write_is_found_out_though_its_text_is_elsewhere(
    tokenizer: PreTrainedTokenizerFast, template: str, response: Message, reason: str
) -> None:
    tokenizer.chat_template = template
    [found] = ResponseRenderer(tokenizer, chat=True).encode(["1+1?"], [response])
    assert isinstance(found, UnrenderedRow)
    assert re.search(reason, str(found)), found


@pytest.mark.parametrize(
    ("content", "expected"),
    [("Even?\n</seed:think>\nTwo.", "Even?\n</seed:think>\nTwo."), ("<seed:think>\nEven?\n</seed:think>\nTwo.", "Even?\n</seed:think>\nTwo.")],
)  # fmt: skip
def test_a_thought_whose_tag_has_another_name_goes_on(
    tokenizer: PreTrainedTokenizerFast, content: str, expected: str
) -> None:
    tokenizer.chat_template = OPENS
    [found] = ResponseRenderer(tokenizer, chat=True).encode(["1+1?"], [said(content)])
    assert not isinstance(found, UnrenderedRow) and tokenizer.decode(found) == expected + "<|im_end|>"


def test_earlier_turns_have_calls_and_tokens_as_a_server_reads_them(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = CALL_IF_NULL
    asked = Message(role="user", content="1+1?", extra=None)
    result = Message(role="tool", content="2", extra=None)
    [encoded] = encode_conversations(
        tokenizer, [[asked, said("", tool_calls=[call(a=1)]), result]], chat=True
    )
    assert '<call>add {"a": 1}</call>' in tokenizer.decode(encoded.ids)
    tokenizer.chat_template = BRACKETS.replace("loop.last", "true")
    turns = [asked, said("[THINK]Even?[/THINK]Two."), asked]
    [encoded] = encode_conversations(tokenizer, [turns], chat=True)
    fields = [{"role": each["role"], "content": each["content"]} for each in turns]
    text = tokenizer.apply_chat_template(fields, tokenize=False, add_generation_prompt=True)
    assert encoded.ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_an_earlier_turn_is_learnt_with_all_that_closes_it(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CLOSES_TWICE
    asked = Message(role="user", content="1+1?", extra=None)
    [encoded] = encode_conversations(tokenizer, [[asked, said("Two."), asked]], chat=True)
    learnt = "".join(tokenizer.decode(encoded.ids[begin:end]) for begin, end in encoded.spoken)
    assert learnt == "Two.<|/resp|><|im_end|>"


def test_a_sampled_text_gets_back_the_special_tokens_that_decoding_left_out(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = CLOSES_TWICE.replace("<|/resp|>", "\n<|/resp|>")
    sampled = Message(role="assistant", content="Two.\n", extra=AS_SAMPLED)
    [found] = ResponseRenderer(tokenizer, chat=True).encode(["1+1?"], [sampled])
    assert not isinstance(found, UnrenderedRow)
    assert tokenizer.decode(found) == "Two.\n<|/resp|><|im_end|>"


def test_tokens_that_a_template_writes_are_those_it_names_or_has_in_a_variable(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = "{{ eos_token }}<|channel|>"
    assert set(tokens_that_are_written(tokenizer)) == {"<|im_end|>", "<|channel|>"}
