"""Show rows as a model reads them: the text of their tokens, and which of it is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from vantage.models.conversations import encode_conversations
from vantage.models.rendered_responses import UnrenderedRow
from vantage.schemas.conversations import Message
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.stages_on_data import TrainOn
from vantage.tasks.data.encoded_rows import encode_rows
from vantage.tasks.data.examples import Codec

_NO_LIMIT = 2**31 - 1
"""Largest limit that a recipe may set."""

Part = tuple[str, bool]
"""A piece of text, and whether it is trained on."""


@dataclass(frozen=True)
class Rendered:
    """A row as tokens, none of which are cut off."""

    parts: list[Part]
    prompt_tokens: int
    response_tokens: int
    """Number of the response's tokens; 0 without a response."""


def render(
    codec: Codec,
    prompt: str,
    messages: list[Message] | None,
    response: Message | None,
    *,
    train_on: TrainOn,
) -> Rendered:
    """Return the row's text in pieces, and how many tokens its prompt and its response have.

    Raises:
        UnrenderedRow: the chat template refuses it or writes it otherwise, or it was rendered before.
    """
    row = {"prompt": prompt, "messages": messages}
    if response is not None:
        row |= {"response": response["content"], "response_extra": response["extra"]}
    encoded = encode_rows([row], [] if response is None else ["response"], _without_limits(codec))
    if encoded.refused:
        raise UnrenderedRow(encoded.refused[0])
    [ids] = encoded.prompt_ids
    learnt = [False] * len(ids)
    if messages is not None and train_on == "all_responses":
        [turns] = encode_conversations(codec.tokenizer, [messages], chat=codec.chat)
        for begin, end in turns.spoken:
            learnt[begin:end] = [True] * (end - begin)
    answer = [token for response_ids, _ in encoded.response_ids[0] for token in response_ids]
    parts = _parts(codec, [*ids, *answer], [*learnt, *([True] * len(answer))])
    return Rendered(parts, len(ids), len(answer))


def _without_limits(codec: Codec) -> Codec:
    return replace(codec, generation=Generation(max_prompt_tokens=_NO_LIMIT, max_response_tokens=_NO_LIMIT))


def _parts(codec: Codec, ids: Sequence[int], learnt: Sequence[bool]) -> list[Part]:
    parts = []
    for is_learnt, tokens in groupby(zip(ids, learnt, strict=True), key=lambda token: token[1]):
        text = codec.tokenizer.decode([token for token, _ in tokens], clean_up_tokenization_spaces=False)
        parts.append((str(text), is_learnt))
    return parts
