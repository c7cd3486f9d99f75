"""Rows of text become token ids: what the stages feed to a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from models.prompts import PromptTooLong, encode_prompt, encode_response
from models.sequences import Sequences, collate
from schemas.recipe import Generation
from tasks.rows import Row


class NothingLeft(ValueError):
    """A split of which no row fits the recipe's limits."""


@dataclass(frozen=True)
class Prompts:
    """Prompts that fit ``generation.max_prompt_tokens``, as text and as ids."""

    texts: list[str]
    ids: list[list[int]]
    num_too_long: int

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Completions:
    """Prompts with one response (demonstrations) or two (preferences: chosen, rejected), as ids."""

    prompt_ids: list[list[int]]
    response_ids: dict[str, list[list[int]]]
    """``response``, or ``chosen`` and ``rejected``: a list as long as the prompts'."""
    num_too_long: int

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def lengths(self) -> list[int]:
        """Tokens of the longest response to each prompt."""
        return [max(map(len, responses)) for responses in zip(*self.response_ids.values(), strict=True)]

    def batch(self, column: str, indices: Sequence[int], *, pad_token_id: int) -> Sequences:
        """The prompts at ``indices``, each with its response in ``column``."""
        return self.stacked([column], indices, pad_token_id=pad_token_id)

    def stacked(self, columns: Sequence[str], indices: Sequence[int], *, pad_token_id: int) -> Sequences:
        """The prompts at ``indices`` with the responses of the first column, then again with the next."""
        return collate(
            [self.prompt_ids[i] for _ in columns for i in indices],
            [self.response_ids[column][i] for column in columns for i in indices],
            pad_token_id=pad_token_id,
        )


def encode_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, generation: Generation, chat: bool | None
) -> Prompts:
    """Prompts as ids; longer ones than the limit are counted and left out."""
    texts, ids = [], []
    for row in rows:
        try:
            encoded = encode_prompt(tokenizer, row["prompt"], chat=chat, max_tokens=generation.max_prompt_tokens)
        except PromptTooLong:
            continue
        texts.append(row["prompt"])
        ids.append(encoded)
    _refuse_nothing(len(ids), len(rows), generation)
    return Prompts(texts=texts, ids=ids, num_too_long=len(rows) - len(ids))


def encode_completions(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    columns: Sequence[str],
    generation: Generation,
    chat: bool | None,
) -> Completions:
    """Prompts and their responses as ids. Long prompts are left out, long responses are cut (and end without EOS)."""
    prompt_ids: list[list[int]] = []
    response_ids: dict[str, list[list[int]]] = {column: [] for column in columns}
    for row in rows:
        try:
            prompt_ids.append(
                encode_prompt(tokenizer, row["prompt"], chat=chat, max_tokens=generation.max_prompt_tokens)
            )
        except PromptTooLong:
            continue
        for column in columns:
            ids, _ = encode_response(tokenizer, row[column], max_tokens=generation.max_response_tokens, chat=chat)
            response_ids[column].append(ids)
    _refuse_nothing(len(prompt_ids), len(rows), generation)
    return Completions(prompt_ids=prompt_ids, response_ids=response_ids, num_too_long=len(rows) - len(prompt_ids))


def _refuse_nothing(kept: int, total: int, generation: Generation) -> None:
    if not kept:
        raise NothingLeft(
            f"generation.max_prompt_tokens={generation.max_prompt_tokens} is shorter than each of the {total} prompts; "
            "raise it, or shorten the template in data.*.columns"
        )


def token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What sampling needs to know of a tokenizer, as keywords."""
    return {"eos_token_ids": [tokenizer.eos_token_id], "pad_token_id": tokenizer.pad_token_id}
