"""Turn rows of text into token ids for the stages' networks."""

import copy
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vantage.models.conversations import encode_conversations
from vantage.models.folders import load_tokenizer
from vantage.models.pinned_date import pin_date
from vantage.models.prompts import decode_all, stop_token_ids
from vantage.models.sequences import Sequences, Spans, collate
from vantage.models.stop_strings import StopStrings, before_stop, special_stops
from vantage.models.turn_end import without_end
from vantage.schemas.conversations import Message
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.stages_on_data import TrainOn
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.encoded_rows import encode_rows
from vantage.tasks.data.encoding_counts import NOT_COUNTED, EncodingCounts
from vantage.tasks.data.halves import rows_of_half
from vantage.tasks.data.rows import Row, column_names, row_batches
from vantage.tasks.data.token_rows import GroupedRows, JsonRowsWriter, TokenRowsWriter
from vantage.tasks.training.measured import clusters_of_ids

log = logging.getLogger(__name__)

PASS_RATE = "pass_rate"
"""Column of prompts that were selected by their pass rate."""
_ROWS_AT_ONCE = 4096
"""Number of rows whose text is in memory while it becomes ids."""


class NothingLeft(ValueError):
    """No row of a split fits the recipe's limits."""


@dataclass(frozen=True)
class Codec:
    """Tokenizer and settings of one model in one recipe, to turn text into ids and back."""

    tokenizer: PreTrainedTokenizerBase
    generation: Generation
    chat: bool | None
    scratch: Path | None = None
    """Folder for the ids of many rows; None: they stay in memory."""

    @property
    def pad_token_id(self) -> int:
        """Id that fills the ends of rows; it is masked everywhere."""
        return int(self.tokenizer.pad_token_id)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sampled response: the model's own, and special tokens in ``generation.stop``."""
        own = stop_token_ids(self.tokenizer, chat=self.chat)
        return tuple(dict.fromkeys((*own, *special_stops(self.tokenizer, self.generation.stop))))

    @cached_property
    def stop_strings(self) -> StopStrings | None:
        """Texts that end a sampled response; None: there are none."""
        return StopStrings(self.tokenizer, self.generation.stop) if self.generation.stop else None

    @cached_property
    def apart(self) -> "Codec":
        """The same codec for another thread. Threads cannot share a tokenizer, since each call may change how it reads
        special tokens."""
        return replace(self, tokenizer=copy.deepcopy(self.tokenizer))

    def response_texts(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Return sampled responses as text for people, verifiers and judges: up to the first stop string."""
        return [before_stop(text, self.generation.stop) for text in self.whole_texts(responses)]

    def whole_texts(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of responses without their closing token."""
        return decode_all(self.tokenizer, without_end(self.tokenizer, responses, chat=self.chat))


def codec_of(job: StageJob, role: str) -> Codec:
    """Return the codec of the model in ``role``.

    Raises:
        ValueError: no response can contain a stop string of the recipe.
    """
    codec = Codec(
        tokenizer=pin_date(load_tokenizer(job.inputs[role]), job.date),
        generation=job.generation,
        chat=job.chat,
        scratch=job.scratch,
    )
    special_stops(codec.tokenizer, job.generation.stop)
    return codec


@dataclass(frozen=True)
class Prompts:
    """Prompts that fit ``generation.max_prompt_tokens``, as text and as ids."""

    texts: Sequence[str]
    ids: Sequence[list[int]]
    answers: Sequence[str | None]
    """Reference answers that a verifier may compare responses with; None for a row without one."""
    num_too_long: int
    """Number of prompts that did not fit and were left out."""
    counts: EncodingCounts = NOT_COUNTED
    conversations: Sequence[list[Message] | None] | None = None
    """Turns of prompts that are conversations; None: no prompt is one."""
    pass_rates: Sequence[float] | None = None
    """Pass rates in collected responses, for prompts that were selected by them; None: the prompts were not."""

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Completions:
    """Prompts with one response (demonstrations) or two (preferences: chosen, rejected), as ids."""

    prompt_ids: Sequence[list[int]]
    response_ids: Mapping[str, Sequence[list[int]]]
    """``response``, or ``chosen`` and ``rejected`` → as many responses as there are prompts."""
    pad_token_id: int
    num_too_long: int
    """Number of rows that were left out because the prompt did not fit."""
    counts: EncodingCounts = NOT_COUNTED
    margins: Sequence[float] | None = None
    """Margins of preferences, if the rows have them: the least amount by which the chosen response should outscore the
    other."""
    learnt: Sequence[Sequence[int]] | None = None
    """Ranges of learnt tokens, for demonstrations that are the rest of a conversation: begin, end, begin …"""
    subgroups: list[str | None] | None = None
    """Subgroups of preferences, if the rows have them: the part of the data that each pair belongs to."""
    labels: Sequence[int] | None = None
    """Labels of single responses, if the rows have them: 1 for a desirable one, 0 for another."""

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def lengths(self, indices: Sequence[int] | None = None) -> Sequence[int]:
        """Return the tokens of each prompt with its longest response, for all rows or those at ``indices``."""
        rows, sides = range(len(self)) if indices is None else indices, self.response_ids.values()
        return array("i", (len(self.prompt_ids[i]) + max(len(side[i]) for side in sides) for i in rows))

    def clusters(self) -> Tensor:
        """Return the number of each row's prompt, (N,): rows of one prompt are not independent."""
        return clusters_of_ids(self.prompt_ids)

    def num_learnt(self) -> list[int]:
        """Return the number of learnt tokens of each demonstration."""
        if self.learnt is None:
            return [len(response) for response in self.response_ids["response"]]
        return [sum(row[1::2]) - sum(row[::2]) for row in self.learnt]

    def batch(self, indices: Sequence[int]) -> Sequences:
        """Return the prompts at ``indices`` with the responses of the first column, then the same prompts with those of
        the next."""
        return collate(
            [self.prompt_ids[i] for _ in self.response_ids for i in indices],
            [responses[i] for responses in self.response_ids.values() for i in indices],
            pad_token_id=self.pad_token_id,
            learnt=None if self.learnt is None else [_spans(self.learnt[i]) for i in indices],
        )


@dataclass(frozen=True)
class RankedBatch:
    """N completions, those of a prompt next to each other: ``ranks`` and ``group_ids`` (N,), integers."""

    sequences: Sequences
    ranks: Tensor
    """Ranks, lower is better, equal for a tie; they are comparable only within a prompt."""
    group_ids: Tensor
    """Place in the batch of each completion's prompt."""

    def to(self, device: torch.device | str) -> "RankedBatch":
        """Return the same batch on another device."""
        return RankedBatch(
            sequences=self.sequences.to(device),
            ranks=self.ranks.to(device),
            group_ids=self.group_ids.to(device),
        )


@dataclass(frozen=True)
class Rankings:
    """Prompts with two or more ranked responses each, as ids."""

    prompt_ids: Sequence[list[int]]
    response_ids: Sequence[list[list[int]]]
    """Prompt → its responses."""
    ranks: Sequence[list[int]]
    """Prompt → the rank of each response, from 0, the best; equal for a tie."""
    pad_token_id: int
    num_too_long: int
    """Number of rows that were left out because the prompt did not fit."""
    counts: EncodingCounts = NOT_COUNTED

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def lengths(self, indices: Sequence[int] | None = None) -> Sequence[int]:
        """Return the tokens of each prompt with its longest response, for all rows or those at ``indices``."""
        rows = range(len(self)) if indices is None else indices
        return array("i", (len(self.prompt_ids[i]) + max(map(len, self.response_ids[i])) for i in rows))

    def sizes(self, indices: Sequence[int] | None = None) -> list[int]:
        """Return the number of responses to each prompt, for all prompts or those at ``indices``."""
        rows = range(len(self)) if indices is None else indices
        return [len(self.response_ids[i]) for i in rows]

    def clusters(self) -> Tensor:
        """Return the number of each row's prompt, (N,): rows of one prompt are not independent."""
        return clusters_of_ids(self.prompt_ids)

    def batch(self, indices: Sequence[int]) -> RankedBatch:
        """Return all completions of the prompts at ``indices``, prompt by prompt."""
        ranks, group_ids = self.ranks_of(indices)
        sequences = collate(
            [self.prompt_ids[i] for i in indices for _ in self.response_ids[i]],
            [response for i in indices for response in self.response_ids[i]],
            pad_token_id=self.pad_token_id,
        )
        return RankedBatch(sequences=sequences, ranks=ranks, group_ids=group_ids)

    def ranks_of(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ranks and group ids of the same completions as ``batch``."""
        ranks = [rank for i in indices for rank in self.ranks[i]]
        group_ids = [place for place, i in enumerate(indices) for _ in self.ranks[i]]
        return torch.tensor(ranks), torch.tensor(group_ids)


def read_prompts(folder: Path, split: str, codec: Codec) -> Prompts:
    """Return the prompts of one split of a dataset as ids; those longer than the recipe's limit are left out."""
    there = column_names(folder, split)
    has_turns, has_rates = "messages" in there, PASS_RATE in there
    rates = array("d")
    ids = TokenRowsWriter(codec.scratch)
    texts, answers, conversations = (JsonRowsWriter(codec.scratch) for _ in range(3))
    counts, num_too_long = NOT_COUNTED, 0
    for rows in row_batches(folder, split, _ROWS_AT_ONCE):
        encoded = encode_rows(rows, (), codec)
        ids.extend(encoded.prompt_ids)
        texts.extend(row["prompt"] for row in encoded.rows)
        answers.extend(row.get("answer") for row in encoded.rows)
        conversations.extend(row["messages"] for row in encoded.rows if has_turns)
        rates.extend(row[PASS_RATE] for row in encoded.rows if has_rates)
        counts, num_too_long = counts + encoded.counts(codec), num_too_long + encoded.num_too_long
    _refuse_no_fit(counts, num_too_long, codec)
    log.info("%s: %s rows, %s of them with a prompt that is too long", split, counts.num_rows, num_too_long)
    return Prompts(
        texts=texts.rows(),
        ids=ids.rows(),
        answers=answers.rows(),
        num_too_long=num_too_long,
        counts=counts,
        conversations=conversations.rows() if has_turns else None,
        pass_rates=rates if has_rates else None,
    )


def read_completions(
    folder: Path,
    split: str,
    columns: Sequence[str],
    codec: Codec,
    *,
    train_on: TrainOn = "last_response",
    enough: int | None = None,
    half: int | None = None,
) -> Completions:
    """Return prompts and responses of one split as ids.

    Prompts that are too long are left out. Long responses are cut off (no EOS); pairs whose sides are then equal are left out.

    Args:
        enough: as many usable rows as are needed; when they are there, the rest of the file is not read. None: read all.
        train_on: for demonstrations that are conversations. With `all_responses`, the response begins with the
            assistant's first turn, and the messages of others in it are not learnt.
        half: read the rows of one half of the prompts (``vantage.tasks.data.halves``); None: of all prompts.
    """
    there = column_names(folder, split)
    has_turns, has_margins, has_subgroups, has_labels = (
        name in there for name in ("messages", "margin", "subgroup", "label")
    )
    prompts = TokenRowsWriter(codec.scratch)
    responses = {column: TokenRowsWriter(codec.scratch) for column in columns}
    learnt = TokenRowsWriter(codec.scratch)
    margins, labels = array("d"), array("b")
    subgroups: list[str | None] = []
    names: dict[str | None, str | None] = {}  # keeps each name in memory only once
    counts, num_too_long, num_kept = NOT_COUNTED, 0, 0
    for rows in rows_of_half(folder, split, half, at_once=_ROWS_AT_ONCE):
        part = _encode_completions(rows, columns, codec)
        if has_turns and train_on == "all_responses":
            part = _with_earlier_turns(part, codec)
        prompts.extend(part.prompt_ids)
        for column in columns:
            responses[column].extend(part.response_ids[column])
        learnt.extend(part.learnt)
        margins.extend(row["margin"] or 0.0 for row in part.rows if has_margins)
        labels.extend(row["label"] for row in part.rows if has_labels)
        subgroups += [
            names.setdefault(row["subgroup"], row["subgroup"]) for row in part.rows if has_subgroups
        ]
        counts, num_too_long = counts + part.counts, num_too_long + part.num_too_long
        num_kept += len(part.rows)
        if enough is not None and num_kept >= enough:
            break
    log.info("%s: %s rows, %s of them with a prompt that is too long", split, counts.num_rows, num_too_long)
    _refuse_no_fit(counts, num_too_long, codec)
    if not len(kept := prompts.rows()):
        raise _nothing_differs(counts.num_rows - num_too_long, codec)
    return Completions(
        prompt_ids=kept,
        response_ids={column: writer.rows() for column, writer in responses.items()},
        pad_token_id=codec.pad_token_id,
        num_too_long=num_too_long,
        counts=counts,
        margins=margins if has_margins else None,
        learnt=learnt.rows() if has_turns and train_on == "all_responses" else None,
        subgroups=subgroups if has_subgroups else None,
        labels=labels if has_labels else None,
    )


@dataclass(frozen=True)
class _Part:
    """The completions of some rows."""

    rows: list[Row]
    """Usable rows, with their ids below."""
    prompt_ids: list[list[int]]
    response_ids: dict[str, list[list[int]]]
    counts: EncodingCounts
    num_too_long: int
    """Rows whose prompt does not fit."""
    learnt: list[list[int]]
    """Ranges of learnt tokens as in ``Completions``; empty: all tokens of each response."""


def _encode_completions(rows: list[Row], columns: Sequence[str], codec: Codec) -> _Part:
    encoded = encode_rows(rows, columns, codec)
    sides = encoded.response_ids
    kept = [place for place, side in enumerate(sides) if len(side) < 2 or any(_differ(side))]
    return _Part(
        rows=[encoded.rows[place] for place in kept],
        prompt_ids=[encoded.prompt_ids[place] for place in kept],
        response_ids={column: [sides[place][n][0] for place in kept] for n, column in enumerate(columns)},
        counts=encoded.counts(codec, num_alike=len(sides) - len(kept)),
        num_too_long=encoded.num_too_long,
        learnt=[],
    )


def _with_earlier_turns(part: _Part, codec: Codec) -> _Part:
    """Return demonstrations whose response begins with the assistant's first turn."""
    given = [row["messages"] for row in part.rows if row["messages"] is not None]
    encoded = iter(encode_conversations(codec.tokenizer, given, chat=codec.chat))
    prompts, responses, learnt = [], [], []
    for row, prompt, last in zip(part.rows, part.prompt_ids, part.response_ids["response"], strict=True):
        spoken = [] if row["messages"] is None else next(encoded).spoken
        begin = spoken[0][0] if spoken else len(prompt)
        response = [*prompt[begin:], *last]
        prompts.append(prompt[:begin])
        responses.append(response)
        spans = [place - begin for span in spoken for place in span]
        learnt.append([*spans, len(response) - len(last), len(response)])
    return replace(part, prompt_ids=prompts, response_ids={"response": responses}, learnt=learnt)


def _spans(places: Sequence[int]) -> Spans:
    return list(zip(places[::2], places[1::2], strict=True))


def read_rankings(folder: Path, split: str, codec: Codec, *, half: int | None = None) -> Rankings:
    """Return prompts and ranked responses of one split as ids, cut and left out as in ``read_completions``.

    Among responses that are the same tokens with different ranks, only the best-ranked one is kept.
    """
    prompts, responses, ranks = (TokenRowsWriter(codec.scratch) for _ in range(3))
    counts, num_too_long = NOT_COUNTED, 0
    for rows in rows_of_half(folder, split, half, at_once=_ROWS_AT_ONCE):
        encoded = encode_rows(rows, ["responses"], codec)
        num_alike = 0
        for row, ids, sides in zip(encoded.rows, encoded.prompt_ids, encoded.response_ids, strict=True):
            of_prompt, places, is_alike = _ranked([side for side, _ in sides], row["ranks"])
            num_alike += is_alike
            if len(set(places)) > 1:
                prompts.extend([ids])
                responses.extend(of_prompt)
                ranks.extend([places])
        counts = counts + encoded.counts(codec, num_alike=num_alike)
        num_too_long += encoded.num_too_long
    _refuse_no_fit(counts, num_too_long, codec)
    log.info("%s: %s rows, %s of them with a prompt that is too long", split, counts.num_rows, num_too_long)
    if not len(kept := prompts.rows()):
        raise _nothing_differs(counts.num_rows - num_too_long, codec)
    places_of = ranks.rows()
    return Rankings(
        prompt_ids=kept,
        response_ids=GroupedRows(responses.rows(), places_of.lengths()),
        ranks=places_of,
        pad_token_id=codec.pad_token_id,
        num_too_long=num_too_long,
        counts=counts,
    )


def _ranked(responses: list[list[int]], ranks: Sequence[float]) -> tuple[list[list[int]], list[int], bool]:
    """Return the responses without those that equal a better-ranked one, their places, and whether there were such."""
    best: dict[tuple[int, ...], float] = {}
    for response, rank in zip(responses, ranks, strict=True):
        best[tuple(response)] = min(rank, best.get(tuple(response), rank))
    kept = [i for i, response in enumerate(responses) if ranks[i] == best[tuple(response)]]
    return (
        [responses[i] for i in kept],
        _places([ranks[i] for i in kept]),
        len(kept) < len(responses),
    )


def _differ(side: Sequence[tuple[list[int], bool]]) -> list[bool]:
    first, _ = side[0]
    return [ids != first for ids, _ in side[1:]]


def _nothing_differs(num_rows: int, codec: Codec) -> NothingLeft:
    limit = codec.generation.max_response_tokens
    return NothingLeft(
        f"each of the {num_rows} rows has responses that are the same tokens, so there is nothing to compare: either "
        f"generation.max_response_tokens={limit} cuts off what differs, or the model's tokenizer does not know it"
    )


def _places(ranks: Sequence[float]) -> list[int]:
    """Return integers of the same order and ties, which no tensor rounds: (0.1, 3.5, 0.1) → (0, 1, 0)."""
    place_of = {rank: place for place, rank in enumerate(sorted(set(ranks)))}
    return [place_of[rank] for rank in ranks]


def _refuse_no_fit(counts: EncodingCounts, num_too_long: int, codec: Codec) -> None:
    if counts.num_refused == counts.num_rows:
        raise NothingLeft(
            f"none of the {counts.num_rows} rows fits the model's chat template; the first: {counts.refused[0]}"
        )
    if num_too_long == counts.num_rows - counts.num_refused:
        raise NothingLeft(
            f"generation.max_prompt_tokens={codec.generation.max_prompt_tokens} is shorter than each of the {num_too_long} "
            f"prompts (the shortest has {counts.shortest_prompt} tokens); raise it, or shorten the template in data.*.columns"
        )
