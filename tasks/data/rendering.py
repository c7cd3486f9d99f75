"""Rows as a model reads them: the text of their tokens, and which of it is trained on."""

from collections.abc import Sequence
from itertools import groupby

from vantage.models.conversations import encode_conversations
from vantage.models.prompts import encode_prompts, encode_responses
from vantage.schemas.conversations import Message
from vantage.schemas.recipe.stages import TrainOn
from vantage.tasks.data.examples import Codec

Part = tuple[str, bool]
"""A piece of text, and whether it is trained on."""


def render(
    codec: Codec, prompt: str, messages: list[Message] | None, response: str | None, *, train_on: TrainOn
) -> tuple[list[Part], int, int]:
    """Return the row's text in pieces, tokens of its prompt, and tokens of its response (0 without one).

    Nothing is cut off.
    """
    [ids] = encode_prompts(codec.tokenizer, [messages or prompt], chat=codec.chat)
    learnt = [False] * len(ids)
    if messages is not None and train_on == "all_responses":
        [encoded] = encode_conversations(codec.tokenizer, [messages], chat=codec.chat)
        for begin, end in encoded.spoken:
            learnt[begin:end] = [True] * (end - begin)
    answer: list[int] = []
    if response is not None:
        [(answer, _)] = encode_responses(
            codec.tokenizer, [response], max_tokens=len(response.encode()) + 16, chat=codec.chat
        )
    return (
        _parts(codec, [*ids, *answer], [*learnt, *([True] * len(answer))]),
        len(ids),
        len(answer),
    )


def _parts(codec: Codec, ids: Sequence[int], learnt: Sequence[bool]) -> list[Part]:
    parts = []
    for is_learnt, tokens in groupby(zip(ids, learnt, strict=True), key=lambda token: token[1]):
        text = codec.tokenizer.decode([token for token, _ in tokens], clean_up_tokenization_spaces=False)
        parts.append((str(text), is_learnt))
    return parts
