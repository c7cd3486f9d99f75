"""White space that some chat templates put between their own text and the assistant's words."""

from collections.abc import Sequence

from vantage.models.prompts import encode_responses
from vantage.tasks.data.examples import Codec

OPENING_TOKENS = 64
"""More tokens than any such white space has."""


def opening_of(codec: Codec) -> str:
    """Return the white space that begins each response of the codec's model; empty for most templates."""
    [(ids, _)] = encode_responses(codec.tokenizer, [""], max_tokens=OPENING_TOKENS, chat=codec.chat)
    return codec.whole_texts([ids])[0]


def without_opening(responses: Sequence[str], codec: Codec) -> list[str]:
    """Return responses without the leading white space of some chat templates, which every reader of the pairs adds again."""
    opening = opening_of(codec)
    return [response.removeprefix(opening) for response in responses]
