"""Batches of prompts with their responses, padded on the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from vantage.models.row_lengths import RowLengths, first_places, on_device

Spans = Sequence[tuple[int, int]]
"""Begin and end of ranges of tokens."""


@dataclass(frozen=True, eq=False)
class Packing:
    """Layout of B sequences in S rows of C tokens, with several sequences in a row; see `vantage.models.packing`."""

    input_ids: Tensor
    """(S, C): sequence after sequence, then padding."""
    position_ids: Tensor
    """(S, C): from 0 in each sequence; 0 in the padding."""
    rows: Tensor
    """(B,): the row of each sequence."""
    starts: Tensor
    """(B,): the column at which each sequence begins in its row."""

    def places(self, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column of tokens at ``positions`` (N,) of the sequences (N,)."""
        return self.rows[sequences], self.starts[sequences] + positions


class Layout(Protocol):
    """Layout of the sequences of a pass: `Packing`, or `vantage.models.parts.Parts`."""

    def places(self, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column, among the hidden states of the pass, of tokens at ``positions`` (N,) of the sequences (N,)."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """B sequences, compact: L is the longest prompt + response, T the longest response.

    Masks are made from lengths, never from ids, since the padding token may be the end-of-sequence token.
    """

    input_ids: Tensor
    """(B, L): prompt, response, padding."""
    attention_mask: Tensor
    """(B, L), True on prompt and response."""
    response_ids: Tensor
    """(B, T): response, padding."""
    response_mask: Tensor
    """(B, T), True on response tokens, including the end-of-sequence token."""
    prompt_lengths: Tensor
    """(B,), at least 1."""
    loss_mask: Tensor | None = None
    """(B, T), True on the response tokens that are learnt; None: all of them. If a response is the rest of a
    conversation, the turns of others are not learnt."""
    layout: Layout | None = None
    """Layout of a pass over the sequences; None: one row each. The model's results are the same in every layout."""
    given_lengths: RowLengths | None = None
    """Lengths that are known without reading the tensors."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def learnt(self) -> Tensor:
        """(B, T), True on the response tokens that are learnt."""
        return self.response_mask if self.loss_mask is None else self.loss_mask

    @property
    def lengths(self) -> Tensor:
        """(B,): response tokens of each sequence."""
        return self.response_mask.sum(dim=1)

    @property
    def total_lengths(self) -> Tensor:
        """(B,): tokens of each prompt with its response."""
        return self.prompt_lengths + self.lengths

    @cached_property
    def known(self) -> RowLengths:
        """Lengths of the rows as Python numbers; read from the tensors once, unless they were given."""
        if self.given_lengths is not None:
            return self.given_lengths
        prompts, responses = torch.stack([self.prompt_lengths, self.lengths]).tolist()
        return RowLengths(prompts, responses)

    def response_tokens(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Return row and column (N,), in ``response_ids``, of all response tokens of the first ``count`` rows, row by row.

        The result is that of ``response_mask.nonzero``, which would wait for the GPU.
        """
        lengths = self.lengths[:count]
        rows = torch.arange(len(lengths), device=lengths.device)
        rows = rows.repeat_interleave(lengths, output_size=sum(self.known.responses[:count]))
        starts = lengths.cumsum(dim=0) - lengths
        return rows, torch.arange(len(rows), device=lengths.device) - starts[rows]

    @property
    def response_positions(self) -> Tensor:
        """(B, T): position of the hidden state whose logits chose response token t: prompt_length − 1 + t.

        Padding has the position of the last token.
        """
        steps = torch.arange(self.response_ids.shape[1], device=self.prompt_lengths.device)
        return torch.minimum(self.prompt_lengths[:, None] - 1 + steps, self.last_positions[:, None])

    @property
    def last_positions(self) -> Tensor:
        """(B,): position of the last token of each sequence; its hidden state has seen the whole response."""
        return self.total_lengths - 1

    def places(self, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column, in a pass, of tokens at `positions` (N,) of the sequences (N,)."""
        return (sequences, positions) if self.layout is None else self.layout.places(sequences, positions)

    def prompt_rows(self) -> list[list[int]]:
        """Return the prompts' ids, without padding."""
        rows = zip(self.input_ids.tolist(), self.prompt_lengths.tolist(), strict=True)
        return [row[:length] for row, length in rows]

    def response_rows(self) -> list[list[int]]:
        """Return the responses' ids, without padding."""
        rows = zip(self.response_ids.tolist(), self.lengths.tolist(), strict=True)
        return [row[:length] for row, length in rows]

    def first_equal_rows(self) -> Tensor:
        """Return (B,): the first sequence with the same prompt and response; the sequence itself if there is none before it."""
        rows = zip(self.input_ids.tolist(), self.known.prompts, self.known.totals, strict=True)
        found = first_places((prompt, *ids[:total]) for ids, prompt, total in rows)
        return on_device(found, self.input_ids.device)

    def first_equal_prompts(self) -> list[int]:
        """Return for each sequence the first one with the same prompt; the sequence itself if there is none before it."""
        numbers = self.known.prompt_numbers
        return first_places(map(tuple, self.prompt_rows()) if numbers is None else numbers)

    def select(self, indices: slice | Tensor | Sequence[int]) -> "Sequences":
        """Return the sequences at `indices` (in that order, repeats allowed), trimmed to the width that they need, with
        one row each."""
        if isinstance(indices, slice):
            indices = range(len(self))[indices]
        numbers: Sequence[int] = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        rows = on_device(indices if isinstance(indices, Tensor) else numbers, self.input_ids.device)
        known = self.known.select(numbers)
        total, response = max(known.totals, default=0), max(known.responses, default=0)
        return Sequences(
            input_ids=self.input_ids[rows, :total],
            attention_mask=self.attention_mask[rows, :total],
            response_ids=self.response_ids[rows, :response],
            response_mask=self.response_mask[rows, :response],
            prompt_lengths=self.prompt_lengths[rows],
            loss_mask=None if self.loss_mask is None else self.loss_mask[rows, :response],
            given_lengths=known,
        )

    def to(self, device: torch.device | str) -> "Sequences":
        """Return the same sequences on another device, with one row each."""
        return Sequences(
            input_ids=on_device(self.input_ids, device),
            attention_mask=on_device(self.attention_mask, device),
            response_ids=on_device(self.response_ids, device),
            response_mask=on_device(self.response_mask, device),
            prompt_lengths=on_device(self.prompt_lengths, device),
            loss_mask=None if self.loss_mask is None else on_device(self.loss_mask, device),
            given_lengths=self.given_lengths,
        )


def collate(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    learnt: Sequence[Spans] | None = None,
) -> Sequences:
    """Join each prompt's ids with its response's and pad on the right.

    Args:
        learnt: for each response, begin and end of the ranges of tokens that are learnt; None: all tokens.

    Raises:
        ValueError: there is nothing to collate, the numbers of prompts and responses differ, or a prompt is empty (no
            logits would choose the first token).
    """
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(
            f"{len(prompts)} prompts and {len(responses)} responses; give as many of one as of the other"
        )
    empty = [i for i, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise ValueError(
            f"the prompt of row {empty[0]} has no tokens; a prompt needs at least one (such as BOS)"
        )
    known = RowLengths(
        prompts=[len(prompt) for prompt in prompts],
        responses=[len(response) for response in responses],
        prompt_numbers=first_places(map(tuple, prompts)),
    )
    prompt_lengths, response_lengths = torch.tensor(known.prompts), torch.tensor(known.responses)
    whole = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    return Sequences(
        input_ids=_pad(whole, pad_token_id),
        attention_mask=_mask(prompt_lengths + response_lengths, max(known.totals)),
        response_ids=_pad(responses, pad_token_id),
        response_mask=_mask(response_lengths, max(known.responses)),
        prompt_lengths=prompt_lengths,
        loss_mask=None if learnt is None else _spans_mask(learnt, max(known.responses)),
        given_lengths=known,
    )


def join(batches: Sequence[Sequences], *, pad_token_id: int) -> Sequences:
    """Return the sequences of several batches as one, in order.

    Raises:
        ValueError: there is nothing to join, or a batch has tokens that are not learnt.
    """
    if any(batch.loss_mask is not None for batch in batches):
        raise ValueError("batches with a loss_mask cannot be joined; collate their rows")
    prompts = [row for batch in batches for row in batch.prompt_rows()]
    responses = [row for batch in batches for row in batch.response_rows()]
    joined = collate(prompts, responses, pad_token_id=pad_token_id)
    return joined.to(batches[0].input_ids.device)


def _spans_mask(rows: Sequence[Spans], width: int) -> Tensor:
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, spans in enumerate(rows):
        for begin, end in spans:
            mask[row, begin:end] = True
    return mask


def _pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> Tensor:
    width = max(map(len, rows))
    padded = [[*row, *[pad_token_id] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long).reshape(len(rows), width)


def _mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths[:, None]
