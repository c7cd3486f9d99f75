"""Convert prompts and responses from text to token ids and back."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from vantage.models.chat_template import around_words, render_turns, uses_chat
from vantage.models.conversations import encode_conversations
from vantage.models.tokenising import (
    continuations,
    response_decoder,
    tokenise,
    with_one_bos,
    without_trailing_eos,
)
from vantage.models.turn_end import end_token_id, stop_token_ids
from vantage.schemas.conversations import Prompt

__all__ = ["decode_all", "encode_prompts", "encode_responses", "end_token_id", "stop_token_ids"]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, chat: bool | None
) -> list[list[int]]:
    """Return ids of prompts, up to the begin of the response. Their length is not limited: compare it afterwards.

    With a chat template a prompt is the user's turn and the template's opening of the assistant's turn follows.
    Without one it is plain text, with BOS if the tokenizer adds it by its own rule. BOS never occurs twice. For prompts
    of several turns see `vantage.models.conversations`.

    Args:
        chat: whether to use the chat template; None: if the tokenizer has one.

    Raises:
        ValueError: `chat` is True and there is no template, or a prompt has no token.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    talks = [prompt for prompt in prompts if not isinstance(prompt, str)]
    of_texts = iter(_encode_texts(tokenizer, texts, chat=chat))
    of_talks = iter(encode_conversations(tokenizer, talks, chat=chat))
    rows = [next(of_texts) if isinstance(prompt, str) else next(of_talks).ids for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise ValueError(
                f"the prompt {prompt!r} has no tokens; drop it, or use a tokenizer with a BOS token"
            )
    return rows


def _encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, chat: bool | None
) -> list[list[int]]:
    if not texts:
        return []
    if uses_chat(tokenizer, chat):
        rows = tokenise(
            tokenizer, [render_turns(tokenizer, text) for text in texts], add_special_tokens=False
        )
    else:
        rows = tokenise(tokenizer, texts, add_special_tokens=True)
        rows = [without_trailing_eos(tokenizer, row) for row in rows]
    return [with_one_bos(tokenizer, row) for row in rows]


def encode_responses(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[str], *, max_tokens: int, chat: bool | None
) -> list[tuple[list[int], bool]]:
    """Return ids of responses as the model would generate them after their prompts, and whether each ended.

    A response ends with the token that closes it (`end_token_id`) unless it is cut off at `max_tokens`. Special tokens
    that are spelled out in the text stay text.
    """
    end = end_token_id(tokenizer, chat=chat)
    opening = around_words(tokenizer)[0] if uses_chat(tokenizer, chat) else ""
    rows = [[*row, end] for row in continuations(tokenizer, [opening + response for response in responses])]
    return [(row, True) if len(row) <= max_tokens else (row[:max_tokens], False) for row in rows]


def decode_all(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """Return texts of responses' ids without special tokens; the inverse of `encode_responses` without a chat template.

    A space that begins a response is kept, even by tokenizers that drop a text's first space.
    """
    decode = response_decoder(tokenizer)
    return [decode(ids) for ids in rows]
