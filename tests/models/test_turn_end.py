"""Training and sampling end a response with the token by which the chat template closes a turn."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vantage.models.conversations import encode_conversations
from vantage.models.prompts import encode_responses
from vantage.models.turn_end import end_token_id, stop_token_ids, without_end
from vantage.schemas.conversations import Message
from vantage.schemas.recipe.inputs import Generation
from vantage.tasks.data.examples import Codec

EOS, FLAGGED, UNFLAGGED, WORD = "<eos>", "<end>", "</turn>", "[/A]"
OPENING = "{% if add_generation_prompt %}A: {% endif %}"


def _tokenizer(closing: str, *, at_end: str = "") -> PreTrainedTokenizerFast:
    """Return a tokenizer with bytes, a special token `<end>`, an added one without that flag, and `[/A]`, which merges
    of bytes make.

    Args:
        closing: what the template puts after each turn.
        at_end: what follows the last turn, where no response is asked for.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("[", "/"), ("[/", "A"), ("[/A", "]")]
    vocabulary = [*alphabet, *(one + other for one, other in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, "<pad>", FLAGGED])
    tokenizer.add_tokens([AddedToken(UNFLAGGED, special=False, normalized=False)])
    turn = "{{ 'A: ' if m['role'] == 'assistant' else 'U: ' }}{{ m['content'] }}" + closing
    ends = "{% if not add_generation_prompt %}" + at_end + "{% endif %}"
    template = "{% for m in messages %}" + turn + "{% endfor %}" + ends + OPENING
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token="<pad>", chat_template=template
    )


CASES = [
    (EOS, "", EOS),
    (f"{FLAGGED}\n", "", FLAGGED),
    (f"{UNFLAGGED}\n", "", UNFLAGGED),
    (f"{WORD}\n", "", WORD),
    ("\n", "", EOS),  # white space closes nothing
    (".", "", EOS),  # neither does one character
    (" the end\n", "", EOS),  # nor a word of several tokens
    # EOS follows the last turn of a conversation; it is something else that closes a turn
    (f"{FLAGGED}\n", EOS, FLAGGED),
    (f"{UNFLAGGED}\n", EOS, UNFLAGGED),
    (f"{WORD}\n", EOS, WORD),
    ("\n", EOS, EOS),
    # several stand there: a special one closes the turn
    (f"{UNFLAGGED}{FLAGGED}\n", "", FLAGGED),
    (f"{UNFLAGGED}{EOS}", "", EOS),
    (f"{WORD}{UNFLAGGED}", "", UNFLAGGED),
]  # fmt: skip


@pytest.mark.parametrize(("closing", "at_end", "end"), CASES)
def test_a_response_ends_with_what_closes_a_turn(closing: str, at_end: str, end: str) -> None:
    tokenizer = _tokenizer(closing, at_end=at_end)
    number = tokenizer.convert_tokens_to_ids(end)
    assert end_token_id(tokenizer, chat=None) == number
    assert stop_token_ids(tokenizer, chat=None) == tuple(dict.fromkeys((number, tokenizer.eos_token_id)))
    [(ids, ended)] = encode_responses(tokenizer, ["hi"], max_tokens=9, chat=None)
    assert ended
    assert tokenizer.convert_ids_to_tokens(ids) == ["h", "i", end]
    # without the template it is EOS
    assert end_token_id(tokenizer, chat=False) == tokenizer.eos_token_id


@pytest.mark.parametrize(("closing", "at_end", "end"), CASES)
def test_nobody_reads_the_token_that_closed_a_response(closing: str, at_end: str, end: str) -> None:
    codec = Codec(_tokenizer(closing, at_end=at_end), Generation(), None)
    for last in (end, EOS):
        ids = codec.tokenizer.convert_tokens_to_ids(["h", "i", last])
        assert codec.response_texts([ids, ids[:-1], [ids[-1]], []]) == ["hi", "hi", "", ""]


def test_a_response_that_did_not_end_keeps_its_last_token() -> None:
    tokenizer = _tokenizer(f"{FLAGGED}\n")
    unflagged = tokenizer.convert_tokens_to_ids(UNFLAGGED)
    assert without_end(tokenizer, [[1, unflagged]], chat=None) == [[1, unflagged]]


@pytest.mark.parametrize("closing", [UNFLAGGED, WORD])
def test_each_turn_of_a_conversation_is_learnt_with_what_closes_it(closing: str) -> None:
    tokenizer = _tokenizer(f"{closing}\n", at_end=EOS)
    said = (("user", "a"), ("assistant", "yes"), ("user", "b"))
    turns = [Message(role=role, content=content, extra=None) for role, content in said]
    [encoded] = encode_conversations(tokenizer, [turns], chat=None)
    assert tokenizer.decode(encoded.ids) == f"U: a{closing}\nA: yes{closing}\nU: b{closing}\nA: "
    learnt = [encoded.ids[begin:end] for begin, end in encoded.spoken]
    assert tokenizer.decode([token for span in learnt for token in span]) == f"yes{closing}"


def test_a_template_that_refuses_a_second_question_is_asked_for_one_alone() -> None:
    tokenizer = _tokenizer(f"{UNFLAGGED}\n")
    refusing = "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}"
    tokenizer.chat_template = refusing + tokenizer.chat_template
    assert end_token_id(tokenizer, chat=None) == tokenizer.convert_tokens_to_ids(UNFLAGGED)


def test_a_default_system_message_that_has_the_same_words_confuses_nothing() -> None:
    tokenizer = _tokenizer(f"{UNFLAGGED}\n")
    tokenizer.chat_template = f"Weigh your words{FLAGGED}" + tokenizer.chat_template
    assert end_token_id(tokenizer, chat=None) == tokenizer.convert_tokens_to_ids(UNFLAGGED)
