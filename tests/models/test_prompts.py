from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vantage.models.folders import load_tokenizer
from vantage.models.prompts import (
    decode_all,
    encode_prompts,
    encode_responses,
    end_token_id,
    stop_token_ids,
)

TEXTS = [
    "hello",
    " hello",
    "  two spaces",
    "\n\nlines\n",
    "",
    "你好，世界",
    "مرحبا",
    "🙂 emoji 👩‍👩‍👧",
    "a<|im_end|>b",
    "</s>",
]

GEMMA = (
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool | None) -> list[int]:
    [ids] = encode_prompts(tokenizer, [prompt], chat=chat)
    return ids


def encode_response(
    tokenizer: PreTrainedTokenizerBase, response: str, *, max_tokens: int, chat: bool | None
) -> tuple[list[int], bool]:
    [encoded] = encode_responses(tokenizer, [response], max_tokens=max_tokens, chat=chat)
    return encoded


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    [text] = decode_all(tokenizer, [ids])
    return text


@pytest.fixture(scope="module")
def stories_tokenizer(stories: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(stories)


def test_plain_text_begins_with_bos_where_the_tokenizer_puts_it(
    tiny_tokenizer: PreTrainedTokenizerBase, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    # the built-in vocabulary: 4 special tokens, newline, space, then the digits
    assert encode_prompt(tiny_tokenizer, "1 2", chat=None) == [1, 4 + 2 + 1, 5, 4 + 2 + 2]
    ids = encode_prompt(byte_tokenizer, "hello", chat=False)
    assert byte_tokenizer.convert_ids_to_tokens(ids) == ["hello"]


def test_a_prompt_that_spells_bos_out_has_it_once(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_prompt(tiny_tokenizer, "<s>1", chat=None) == [1, 7]


def test_a_chat_is_the_users_turn_and_the_opening_of_the_answer(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = encode_prompt(byte_tokenizer, "你好", chat=None)
    expected = "<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n"
    assert byte_tokenizer.decode(ids) == expected
    assert ids.count(1) == 2  # <|im_start|> is one token, twice


def test_bos_stands_once_where_template_and_tokenizer_both_put_it(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    byte_tokenizer.bos_token = "<|endoftext|>"
    byte_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    byte_tokenizer.chat_template = "<|endoftext|>{{ bos_token }}{{ messages[0]['content'] }}:"
    assert encode_prompt(byte_tokenizer, "a", chat=True)[:2] == [
        0,
        byte_tokenizer.convert_tokens_to_ids("a"),
    ]


def test_a_tokenizer_that_closes_every_text_does_not_close_a_prompt(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    byte_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)]
    )
    ids = encode_prompt(byte_tokenizer, "hello", chat=False)
    assert byte_tokenizer.convert_ids_to_tokens(ids) == ["hello"]


def test_a_template_that_writes_todays_date_is_given_a_fixed_one(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    byte_tokenizer.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }}: {{ messages[0]['content'] }}"
    )
    assert decode(byte_tokenizer, encode_prompt(byte_tokenizer, "a", chat=True)) == "26 Jul 2024: a"


def test_a_prompt_without_tokens_is_refused(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="the prompt '' has no tokens"):
        encode_prompt(byte_tokenizer, "", chat=False)


def test_a_chat_without_template_is_refused(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"model.chat=true, but the tokenizer has no chat template"):
        encode_prompt(tiny_tokenizer, "1", chat=True)


def test_a_response_ends_with_eos_unless_it_is_cut(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_response(tiny_tokenizer, "12", max_tokens=3, chat=None) == ([7, 8, 2], True)
    assert encode_response(tiny_tokenizer, "12", max_tokens=2, chat=None) == ([7, 8], False)
    assert encode_response(tiny_tokenizer, "", max_tokens=2, chat=None) == ([2], True)


@pytest.mark.parametrize("text", TEXTS)
def test_special_tokens_in_a_response_stay_text_and_every_script_comes_back(
    byte_tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids, ended = encode_response(byte_tokenizer, text, max_tokens=100, chat=None)
    assert ended
    assert ids.index(2) == len(ids) - 1
    assert decode(byte_tokenizer, ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_tokenizer_that_puts_a_space_first_gives_back_the_same_text(
    stories_tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    ids, _ = encode_response(stories_tokenizer, text, max_tokens=100, chat=None)
    assert decode(stories_tokenizer, ids) == text


def test_a_response_has_the_ids_that_the_model_would_go_on_with(
    stories_tokenizer: PreTrainedTokenizerBase,
) -> None:
    prompt = encode_prompt(stories_tokenizer, "Once upon", chat=None)
    response, _ = encode_response(stories_tokenizer, " a time", max_tokens=99, chat=None)
    whole = encode_prompt(stories_tokenizer, "Once upon a time", chat=None)
    assert prompt + response[:-1] == whole
    glued, _ = encode_response(stories_tokenizer, "on", max_tokens=99, chat=None)
    assert stories_tokenizer.decode(prompt + glued, skip_special_tokens=True) == "Once uponon"


@pytest.mark.slow
@given(text=st.text(max_size=30))
@settings(max_examples=60)
def test_any_text_comes_back(stories_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids, _ = encode_response(stories_tokenizer, text, max_tokens=1000, chat=None)
    assert decode(stories_tokenizer, ids) == text


def test_a_chat_ends_a_response_with_its_templates_own_token(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    assert end_token_id(byte_tokenizer, chat=True) == 2
    assert stop_token_ids(byte_tokenizer, chat=True) == (2,)
    byte_tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    byte_tokenizer.chat_template = GEMMA
    end = byte_tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert end_token_id(byte_tokenizer, chat=True) == end
    assert end_token_id(byte_tokenizer, chat=False) == 2
    assert stop_token_ids(byte_tokenizer, chat=True) == (end, 2)
    assert encode_response(byte_tokenizer, "hello", max_tokens=9, chat=True)[0][-1] == end


@pytest.mark.parametrize("template", ["chatml", GEMMA, MISTRAL])
def test_prompt_and_response_make_the_text_that_the_template_writes(
    byte_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    byte_tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    if template != "chatml":
        byte_tokenizer.chat_template = template
    prompt = encode_prompt(byte_tokenizer, "hello?", chat=True)
    response, _ = encode_response(byte_tokenizer, "hello!", max_tokens=99, chat=True)
    turns = [{"role": "user", "content": "hello?"}, {"role": "assistant", "content": "hello!"}]
    expected = byte_tokenizer.apply_chat_template(turns, tokenize=False)
    assert byte_tokenizer.decode(prompt + response) == expected.removesuffix("\n")


@pytest.mark.parametrize("name", ["tiny_tokenizer", "byte_tokenizer", "stories_tokenizer"])
def test_many_at_once_are_the_same_as_one_by_one(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    prompts = [text or "x" for text in TEXTS]
    assert encode_prompts(tokenizer, prompts, chat=None) == [
        encode_prompt(tokenizer, prompt, chat=None) for prompt in prompts
    ]
    responses = encode_responses(tokenizer, TEXTS, max_tokens=6, chat=None)
    assert responses == [encode_response(tokenizer, text, max_tokens=6, chat=None) for text in TEXTS]
    rows = [ids for ids, _ in responses]
    assert decode_all(tokenizer, rows) == [decode(tokenizer, row) for row in rows]
    assert (
        encode_prompts(tokenizer, [], chat=None)
        == encode_responses(tokenizer, [], max_tokens=1, chat=None)
        == []
    )
