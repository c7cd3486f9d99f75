"""Count the parts of a dataset's text that a network never sees, and refuse a share above ``max_dropped``."""

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from vantage.schemas.records.job import StageJob

log = logging.getLogger(__name__)

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


SHOWN_REFUSED = 3
"""Number of refused rows that an error shows."""


class TooManyLeftOut(ValueError):
    """More rows than ``max_dropped`` allows cannot be used with this tokenizer and these limits."""


@dataclass(frozen=True)
class EncodingCounts:
    """Counts of the rows of one split, by what happened to them."""

    num_rows: int = 0
    """Rows that were read."""
    longest_prompt: int = 0
    """Tokens of the longest prompt, whether it fits or not."""
    shortest_prompt: int = sys.maxsize
    """Tokens of the shortest prompt."""
    num_responses: int = 0
    """Responses of the rows whose prompt fits."""
    num_cut: int = 0
    """Responses that were cut off at ``generation.max_response_tokens``, and so have no end."""
    num_alike: int = 0
    """Pairs whose two sides are the same tokens, and rankings with two such responses; these are not compared."""
    num_tokens: int = 0
    """Tokens of prompts and responses."""
    num_unknown: int = 0
    """Tokens for text that the tokenizer does not know."""
    num_bytes: int = 0
    """Tokens for a single byte of text."""
    num_refused: int = 0
    """Rows that the chat template refuses or renders differently, or that contain its tokens as text."""
    refused: tuple[str, ...] = ()
    """The first refused rows, each with the reason."""

    def __add__(self, other: "EncodingCounts") -> "EncodingCounts":
        """Return the sum of both counts."""
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(EncodingCounts)
        }
        return EncodingCounts(
            **{
                **sums,
                "refused": sums["refused"][:SHOWN_REFUSED],
                "longest_prompt": max(self.longest_prompt, other.longest_prompt),
                "shortest_prompt": min(self.shortest_prompt, other.shortest_prompt),
            }
        )


NOT_COUNTED = EncodingCounts()
"""Counts for ids that were not read from a dataset."""


class Encoded(Protocol):
    """One split as token ids."""

    @property
    def counts(self) -> EncodingCounts: ...

    @property
    def num_too_long(self) -> int: ...


@dataclass(frozen=True)
class TokenCounts:
    """Number of tokens, and how many of them are unknown text or single bytes."""

    num_tokens: int
    num_unknown: int
    num_bytes: int


def count_tokens(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Sequence[int]]) -> TokenCounts:
    """Count the unknown tokens and the byte tokens (``<0x41>``) among the ids of many texts.

    An unknown token that is also the end of a text, as in GPT-2, cannot be distinguished from it and is not counted.
    """
    others = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unknown = frozenset({tokenizer.unk_token_id} - others - {None})
    bytes_ = frozenset(i for token, i in tokenizer.get_vocab().items() if _BYTE.fullmatch(token))
    num_tokens = num_unknown = num_bytes = 0
    for row in rows:
        num_tokens += len(row)
        num_unknown += sum(map(unknown.__contains__, row))
        num_bytes += sum(map(bytes_.__contains__, row))
    return TokenCounts(num_tokens, num_unknown, num_bytes)


def encoding_metrics(
    job: StageJob, role: str, splits: Sequence[Encoded], *, name: str | None = None
) -> dict[str, float]:
    """Return a stage's metrics about the text in ``role``, over all splits that it reads.

    ``name``: the dataset's name in errors; None: made from stage and role.

    Raises:
        TooManyLeftOut: more rows are unusable than the dataset's ``max_dropped`` allows.
    """
    counts = [split.counts for split in splits]
    num_rows = sum(each.num_rows for each in counts)
    too_long = sum(split.num_too_long for split in splits)
    alike = sum(each.num_alike for each in counts)
    whole = sum(counts, NOT_COUNTED)
    allowed = job.max_dropped.get(role)
    if allowed is not None and too_long + alike + whole.num_refused > allowed * num_rows:
        raise TooManyLeftOut(_complaint(job, role, whole, too_long, name or f"{job.name}.{role}"))
    num_tokens = sum(each.num_tokens for each in counts)
    metrics = {
        "prompts_too_long": too_long,
        "prompts_too_long_share": too_long / num_rows,
        "unknown_token_share": sum(each.num_unknown for each in counts) / num_tokens,
        "single_byte_share": sum(each.num_bytes for each in counts) / num_tokens,
    }
    for row in whole.refused:
        log.warning("%s: left out, as %d rows are: %s", name or role, whole.num_refused, row)
    num_responses = sum(each.num_responses for each in counts)
    if num_responses:
        cut = sum(each.num_cut for each in counts)
        metrics |= {"responses_cut": cut, "responses_cut_share": cut / num_responses}
    return metrics


def comparison_metrics(job: StageJob, role: str, splits: Sequence[Encoded]) -> dict[str, float]:
    """Return the metrics of ``encoding_metrics`` for pairs or rankings, with the number of those that compare nothing."""
    return {
        **encoding_metrics(job, role, splits),
        "rows_alike_after_cut": sum(split.counts.num_alike for split in splits),
    }


def _complaint(job: StageJob, role: str, counts: EncodingCounts, too_long: int, name: str) -> str:
    limits = job.generation
    parts = []
    if too_long:
        parts.append(
            f"{too_long} prompts are longer than generation.max_prompt_tokens={limits.max_prompt_tokens} "
            f"(the longest has {counts.longest_prompt} tokens)"
        )
    if counts.num_alike:
        parts.append(
            f"{counts.num_alike} rows have responses that are the same tokens, cut off at "
            f"generation.max_response_tokens={limits.max_response_tokens}"
        )
    if counts.num_refused:
        fit = "row does not fit" if counts.num_refused == 1 else "rows do not fit"
        parts.append(f"{counts.num_refused} {fit} the model's chat template")
    shown = "".join(f"\n  {each}" for each in counts.refused)
    return (
        f"{name}: {too_long + counts.num_alike + counts.num_refused} of {counts.num_rows} rows cannot be used, "
        f"more than the dataset's max_dropped={job.max_dropped[role]:g} allows: {'; '.join(parts)}. Raise the limit, "
        "shorten the texts, correct the rows, or raise max_dropped to train without those rows"
        + (f". The first that do not fit the template:{shown}" if shown else "")
    )
