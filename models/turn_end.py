"""Find the token that closes the assistant's turn: training ends a response with it, and sampling stops at it."""

from collections.abc import Sequence
from itertools import takewhile

import jinja2
from transformers import PreTrainedTokenizerBase

from vantage.models.chat_template import around_words, render_turns, uses_chat
from vantage.models.tokenising import tokenise
from vantage.schemas.conversations import Message


def end_token_id(tokenizer: PreTrainedTokenizerBase, *, chat: bool | None) -> int:
    """Return the token that closes a response.

    Without a chat it is EOS. In a chat it is a token that the template puts after the assistant's words. Of the tokens
    that follow them both in the middle of a conversation and at its end, it is EOS, else the first special one, else
    the first that was added to the vocabulary (its flag `special` may be missing), else a word that is one token. If
    there is none, the tokens at the end of a conversation count, in the same order, and last EOS. So `<end_of_turn>`
    closes Gemma's turns, whose EOS is another token, and `<|end|>` those of a template that writes EOS after the last
    turn.
    """
    eos = int(tokenizer.eos_token_id)
    if not uses_chat(tokenizer, chat):
        return eos
    closing = around_words(tokenizer)[1]
    ids = _ids(tokenizer, closing)
    of_turn = _shared_beginning(ids, _after_words_within(tokenizer))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    added = set(tokenizer.added_tokens_decoder)
    word = _only_token_of_a_word(tokenizer, closing)
    for candidates, place in (
        ({eos}, of_turn),
        (special, of_turn),
        (added, of_turn),
        (word, of_turn),
        (special, ids),
        (added, ids),
        (word, ids),
    ):
        found = next((each for each in place if each in candidates), None)
        if found is not None:
            return found
    return eos


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, *, chat: bool | None) -> tuple[int, ...]:
    """Return the tokens at which sampling stops: the one that closes a response, and EOS."""
    return tuple(dict.fromkeys((end_token_id(tokenizer, chat=chat), int(tokenizer.eos_token_id))))


def without_end(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]], *, chat: bool | None
) -> list[Sequence[int]]:
    """Return responses without the token that closed them; decoding would drop only a special token."""
    ends = set(stop_token_ids(tokenizer, chat=chat))
    return [row[:-1] if len(row) and row[-1] in ends else row for row in rows]


def _after_words_within(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids after the assistant's words if a user's turn follows; none if the template refuses that."""
    words = "Q0words"  # no template contains this text
    said = (("user", "?"), ("assistant", words), ("user", "?"))
    turns = [Message(role=role, content=content, extra=None) for role, content in said]
    try:
        text = render_turns(tokenizer, turns)
    except jinja2.TemplateError:
        return []
    _, found, after = text.partition(words)
    return _ids(tokenizer, after) if found else []


def _only_token_of_a_word(tokenizer: PreTrainedTokenizerBase, closing: str) -> set[int]:
    """Return the first word of ``closing`` if it is one token: a marker that is an ordinary word of the vocabulary.

    One character is no marker: it may be the end of a quotation in the template.
    """
    words = closing.split()
    ids = _ids(tokenizer, words[0]) if words else []
    return set(ids) if len(ids) == 1 and len(words[0]) > 1 else set()


def _shared_beginning(first: Sequence[int], second: Sequence[int]) -> list[int]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return [one for one, _ in pairs]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenise(tokenizer, [text], add_special_tokens=False)[0]
