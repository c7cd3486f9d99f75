"""Encode conversations of several turns as token ids, and mark the tokens that the assistant wrote.

A conversation is tokenised in pieces: the text around the assistant's earlier words as part of the template, and the
words themselves as text, like a response. So earlier turns have the tokens that the model would have generated, and it
is known exactly which tokens are the assistant's. For templates whose turns end with special tokens, the ids are those
of the whole text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
from transformers import PreTrainedTokenizerBase

from vantage.models.chat_template import (
    around_words,
    render_plain,
    render_turns,
    uses_chat,
)
from vantage.models.rendered_responses import tokens_in_words
from vantage.models.tokenising import (
    continuations,
    mixed_continuations,
    tokenise,
    with_one_bos,
    without_trailing_eos,
)
from vantage.models.turn_end import end_token_id
from vantage.schemas.conversations import Message, extras_of

_STAND_IN = "Q{}words"
"""Placeholder, in a rendered template, for the words of an earlier turn of the assistant."""


@dataclass(frozen=True)
class EncodedTurns:
    """A conversation up to the begin of its next response."""

    ids: list[int]
    spoken: list[tuple[int, int]]
    """Begin and end of the tokens that the assistant wrote in each of its turns, including the token that closes
    the turn. A turn that calls tools, or has weight 0, counts as part of the template."""


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]], *, chat: bool | None
) -> list[EncodedTurns]:
    """Return ids of conversations, each of which ends with a user's or a tool's turn.

    Without a chat template each turn begins with its role on its own line, and the assistant's turns end with EOS.

    Raises:
        ValueError: the chat template refuses a conversation, or does not show each of its turns once.
    """
    if not conversations:
        return []
    is_chat = uses_chat(tokenizer, chat)
    pieces = [_pieces(tokenizer, turns, is_chat) for turns in conversations]
    words = [_words(turns) for turns in conversations]
    if is_chat:
        words = [
            _words_in_history(tokenizer, *each) for each in zip(conversations, pieces, words, strict=True)
        ]
    opening = around_words(tokenizer)[0] if is_chat else ""
    if opening:  # white space before the words belongs to the words, as in a response
        pieces = [[*(piece.removesuffix(opening) for piece in row[:-1]), row[-1]] for row in pieces]

    first = _encode_beginnings(tokenizer, [row[0] for row in pieces], is_chat)
    rest = iter(continuations(tokenizer, [piece for row in pieces for piece in row[1:]], as_text=False))
    texts = [opening + text for row in words for text in row]
    tokens = tokens_in_words(tokenizer) if is_chat and texts else ()
    are_markup = [any(token in text for token in tokens) for text in texts]
    spoken = iter(mixed_continuations(tokenizer, texts, are_markup))
    end = end_token_id(tokenizer, chat=chat)
    encoded = []
    for beginning, row in zip(first, words, strict=True):
        ids, spans = list(beginning), []
        for _ in row:
            said, after = next(spoken), next(rest)
            if not is_chat:
                after = [end, *after]
            begin = len(ids)
            ids += said
            spans.append((begin, len(ids)))
            if end in after[:_LONGEST_CLOSING]:
                spans.append((len(ids), len(ids) + after.index(end) + 1))
            ids += after
        encoded.append(EncodedTurns(ids, spans))
    return encoded


_LONGEST_CLOSING = 4
"""Number of tokens after the assistant's words among which the turn's closing token is searched."""


def _pieces(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], is_chat: bool) -> list[str]:
    """Return the rendered conversation without the assistant's words: the text before, between and after them."""
    numbers = iter(range(len(turns)))
    replaced = [
        Message(role=turn["role"], content=_STAND_IN.format(next(numbers)), extra=turn["extra"])
        if _is_spoken(turn)
        else turn
        for turn in turns
    ]
    text = _rendered(tokenizer, replaced) if is_chat else render_plain(replaced)
    pieces = []
    for number in range(len(_words(turns))):
        stand_in = _STAND_IN.format(number)
        if text.count(stand_in) != 1:
            raise ValueError(
                "the model's chat template does not show each turn of the assistant once, so its tokens cannot be told "
                "from the others'; give single turns, or set model.chat: false"
            )
        piece, text = text.split(stand_in)
        pieces.append(piece)
    return [*pieces, text]


def _words_in_history(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], pieces: Sequence[str], words: list[str]
) -> list[str]:
    """Return the assistant's words as the template writes them in past turns, often without thinking.

    Raises:
        ValueError: the words cannot be separated from the template's text around them.
    """
    whole = _rendered(tokenizer, list(turns))
    if _interleaved(pieces, words) == whole:
        return words
    stand_ins = [_STAND_IN.format(number) for number in range(len(words))]
    spoken = [place for place, turn in enumerate(turns) if _is_spoken(turn)]
    found = []
    for number in range(len(words)):
        others = list(turns)
        for place, stand_in in zip(spoken, stand_ins, strict=True):
            if place != spoken[number]:
                others[place] = Message(role="assistant", content=stand_in, extra=turns[place]["extra"])
        text = _rendered(tokenizer, others)
        before = _interleaved(pieces[: number + 1], stand_ins[:number])
        after = _interleaved(pieces[number + 1 :], stand_ins[number + 1 :])
        if not (text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)):
            raise _unlike(whole)
        found.append(text[len(before) : len(text) - len(after)])
    if _interleaved(pieces, found) != whole:
        raise _unlike(whole)
    return found


def _interleaved(pieces: Sequence[str], words: Sequence[str]) -> str:
    """Return the first piece, the first words, the second piece …"""
    return pieces[0] + "".join(text for pair in zip(words, pieces[1:], strict=True) for text in pair)


def _unlike(whole: str) -> ValueError:
    return ValueError(
        f"the model's chat template writes an earlier turn of the assistant otherwise than others: {whole[-300:]!r}; take "
        "such rows out, or set model.chat: false"
    )


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: list[Message]) -> str:
    try:
        return render_turns(tokenizer, turns)
    except jinja2.TemplateError as error:  # some templates have no system turn, or demand alternating turns
        roles = ", ".join(turn["role"] for turn in turns)
        raise ValueError(
            f"the model's chat template refuses a conversation of {roles}: {error}; take such rows out, or set "
            "model.chat: false"
        ) from error


def _words(turns: Sequence[Message]) -> list[str]:
    return [turn["content"] for turn in turns if _is_spoken(turn)]


def _is_spoken(turn: Message) -> bool:
    extras = extras_of(turn)
    return turn["role"] == "assistant" and "tool_calls" not in extras and extras.get("weight") != 0


def _encode_beginnings(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], is_chat: bool
) -> list[list[int]]:
    rows = tokenise(tokenizer, texts, add_special_tokens=not is_chat)
    if not is_chat:
        rows = [without_trailing_eos(tokenizer, row) for row in rows]
    return [with_one_bos(tokenizer, row) for row in rows]
