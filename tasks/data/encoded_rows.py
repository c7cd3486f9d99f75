"""Encode rows of text as token ids by the model's chat template, and collect the rows that the template refuses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2

from vantage.models.chat_template import uses_chat
from vantage.models.prompts import encode_prompts
from vantage.models.rendered_responses import ResponseRenderer, UnrenderedRow, control_tokens, spelled
from vantage.schemas.conversations import Message, Prompt
from vantage.tasks.data.encoding_counts import SHOWN_REFUSED, EncodingCounts, count_tokens
from vantage.tasks.data.rows import Row

if TYPE_CHECKING:
    from vantage.tasks.data.examples import Codec

_SHOWN = 60
Ended = tuple[list[int], bool]
"""Ids of a response, and whether it ended within ``generation.max_response_tokens``."""


@dataclass(frozen=True)
class EncodedRows:
    """The usable rows among some rows, with their ids."""

    rows: list[Row]
    prompt_ids: list[list[int]]
    response_ids: list[list[Ended]]
    """Row → its responses, in the order of the columns or of the list."""
    num_too_long: int
    all_prompts: list[list[int]]
    """Ids of all prompts, also those that are too long."""
    refused: list[str]
    """Reasons why the template refused rows, one for each such row, with its text."""

    def counts(self, codec: "Codec", *, num_alike: int = 0) -> EncodingCounts:
        """Return counts of these rows: all prompts, and the responses to prompts that fit."""
        responses = [each for row in self.response_ids for each in row]
        tokens = count_tokens(codec.tokenizer, [*self.all_prompts, *(ids for ids, _ in responses)])
        lengths = list(map(len, self.all_prompts))
        nothing = EncodingCounts()
        return EncodingCounts(
            num_rows=len(self.all_prompts) + len(self.refused),
            longest_prompt=max(lengths, default=nothing.longest_prompt),
            shortest_prompt=min(lengths, default=nothing.shortest_prompt),
            num_responses=len(responses),
            num_cut=sum(not ended for _, ended in responses),
            num_alike=num_alike,
            num_tokens=tokens.num_tokens,
            num_unknown=tokens.num_unknown,
            num_bytes=tokens.num_bytes,
            num_refused=len(self.refused),
            refused=tuple(self.refused[:SHOWN_REFUSED]),
        )


def encode_rows(rows: Sequence[Row], columns: Sequence[str], codec: "Codec") -> EncodedRows:
    """Return ids of prompts and of the responses in ``columns``; a column holds a text or, for ``responses``, a list of texts.

    Responses are cut off at the recipe's limit. A row is refused if its text contains a token that marks the begin or end of
    a turn or a text: it was rendered before. A row is also refused if the template refuses it, or leaves out a part of it.
    """
    tokens = control_tokens(codec.tokenizer, chat=codec.chat)
    is_chat = uses_chat(codec.tokenizer, codec.chat)
    refused = {
        i: reason
        for i, row in enumerate(rows)
        if (reason := _rendered_before(row, columns, tokens, is_chat=is_chat))
    }
    prompts = {i: _prompt_of(row) for i, row in enumerate(rows) if i not in refused}
    ids = _encode_prompts(prompts, codec, refused)
    fits = [i for i, each in ids.items() if len(each) <= codec.generation.max_prompt_tokens]
    num_too_long = len(ids) - len(fits)
    renderer = ResponseRenderer(codec.tokenizer, chat=codec.chat)
    asked = [(i, response) for i in fits for response in _responses_of(rows[i], columns)]
    encoded = renderer.encode([prompts[i] for i, _ in asked], [response for _, response in asked])
    limit = codec.generation.max_response_tokens
    of_rows: dict[int, list[Ended]] = {i: [] for i in fits}
    for (i, _), response in zip(asked, encoded, strict=True):
        if isinstance(response, UnrenderedRow):
            refused.setdefault(i, str(response))
        else:
            of_rows[i].append((response[:limit], len(response) <= limit))
    kept = [i for i in fits if i not in refused]
    return EncodedRows(
        rows=[rows[i] for i in kept],
        prompt_ids=[ids[i] for i in kept],
        response_ids=[of_rows[i] for i in kept],
        num_too_long=num_too_long,
        all_prompts=[each for i, each in ids.items() if i not in refused],
        refused=[f"{rows[i]['prompt'][:_SHOWN]!r}: {reason}" for i, reason in sorted(refused.items())],
    )


def _encode_prompts(
    prompts: dict[int, Prompt], codec: "Codec", refused: dict[int, str]
) -> dict[int, list[int]]:
    """Return ids by row; reasons why the template refuses a prompt are added to ``refused``."""

    def encoded(rows: Sequence[int]) -> dict[int, list[int]]:
        found = encode_prompts(codec.tokenizer, [prompts[i] for i in rows], chat=codec.chat)
        return dict(zip(rows, found, strict=True))

    try:
        return encoded(list(prompts))
    except (ValueError, jinja2.TemplateError):
        ids: dict[int, list[int]] = {}
        for i in prompts:
            try:
                ids |= encoded([i])
            except (ValueError, jinja2.TemplateError) as error:
                refused[i] = str(error).partition(";")[0]
        return ids


def _rendered_before(row: Row, columns: Sequence[str], tokens: Sequence[str], *, is_chat: bool) -> str | None:
    """Return the reason why a row whose text contains a token of the template is refused.

    Without a chat template, special tokens in a prompt's text are encoded as tokens, so it may be rendered.
    """
    messages = row.get("messages") or []
    texts = [row["prompt"], *(text for turn in messages for text in (turn["content"], turn["extra"]) if text)]
    texts = texts if is_chat else []
    for response in _responses_of(row, columns):
        texts += [response["content"], response["extra"] or ""]
    found = spelled(tokens, texts)
    if not found:
        return None
    return f"holds {found[0]} as text, as rows do that a chat template has rendered already"


def _prompt_of(row: Row) -> Prompt:
    prompt: Prompt = row.get("messages") or row["prompt"]
    return prompt


def _responses_of(row: Row, columns: Sequence[str]) -> list[Message]:
    found = []
    for column in columns:
        texts = row[column] if isinstance(row[column], list) else [row[column]]
        extra = row.get(f"{column}_extra")
        found += [Message(role="assistant", content=text, extra=extra) for text in texts]
    return found
