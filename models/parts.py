"""Compute the sequences of a pass in parts of similar length, and read a prompt that several of them share only once.

A response attends to its prompt's keys and values, which all responses to that prompt share; gradients flow through them
to the prompt. The results equal those of one row for each sequence, except for rounding; docs/decisions/0028.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from vantage.models.packing import takes_positions
from vantage.models.pass_counts import count_pass
from vantage.models.row_lengths import on_device
from vantage.models.sequences import Sequences


@dataclass(frozen=True)
class Cuts:
    """Sequences of a pass by the part in which they are computed; a sequence is named by its place in the pass."""

    parts: Sequence[Sequence[int]]
    """Parts of whole sequences, or of responses alone; each sequence is in one of them."""
    prompts: Sequence[Sequence[int]] = ()
    """Sequences whose prompts are computed before the parts, one for each distinct prompt. Empty: whole sequences are
    computed."""


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """Inputs of one forward pass."""

    input_ids: Tensor
    """(b, L)."""
    attention_mask: Tensor
    """(b, L), True on tokens."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Layout of B sequences in parts; the hidden states of all parts follow each other in a single row."""

    prompts: list[PaddedRows]
    """Distinct prompts, padded on the left, so that each response follows its prompt directly. Empty: no prompt is shared."""
    parts: list[tuple[PaddedRows, Tensor]]
    """Right-padded responses, or whole sequences; and (b,) the prompt of each, counted over all ``prompts``."""
    prompt_starts: Tensor
    """(B,): place of each prompt's first token in that single row."""
    response_starts: Tensor
    """(B,): place of each response's first token in that row, minus the length of its prompt."""
    prompt_lengths: Tensor
    """(B,)."""

    def places(self, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column of tokens at ``positions`` (N,) of the sequences (N,)."""
        of_prompt = positions < self.prompt_lengths[sequences]
        starts = torch.where(of_prompt, self.prompt_starts[sequences], self.response_starts[sequences])
        return torch.zeros_like(starts), starts + positions


def in_parts(sequences: Sequences, cuts: Cuts) -> Sequences:
    """Return the sequences, to be computed in the parts of ``cuts``."""
    device, lengths, known = sequences.input_ids.device, sequences.prompt_lengths, sequences.known
    starts_of_prompts, starts = torch.zeros_like(lengths), torch.zeros_like(lengths)
    number_of, begin = torch.zeros_like(lengths), 0

    prompts: list[PaddedRows] = []
    num_prompts = 0
    for part in cuts.prompts:
        rows = on_device(part, device)
        width = max(known.prompts[place] for place in part)
        padded = _left_padded(sequences.input_ids[rows], lengths[rows], width)
        places = torch.arange(len(part), device=device)
        number_of[rows] = num_prompts + places
        starts_of_prompts[rows] = begin + (places + 1) * width - lengths[rows]
        begin += len(part) * width
        num_prompts += len(part)
        prompts.append(padded)
    first_equal = on_device(sequences.first_equal_prompts(), device) if prompts else None

    parts = []
    for part in cuts.parts:
        rows = on_device(part, device)
        before = torch.zeros_like(rows) if first_equal is None else lengths[rows]
        width = max((known.totals if first_equal is None else known.responses)[place] for place in part)
        if first_equal is None:
            padded = PaddedRows(sequences.input_ids[rows, :width], sequences.attention_mask[rows, :width])
        else:
            padded = PaddedRows(sequences.response_ids[rows, :width], sequences.response_mask[rows, :width])
        starts[rows] = begin + width * torch.arange(len(part), device=device) - before
        begin += len(part) * width
        parts.append((padded, rows if first_equal is None else number_of[first_equal[rows]]))

    starts_of_prompts = starts if first_equal is None else starts_of_prompts[first_equal]
    return replace(sequences, layout=Parts(prompts, parts, starts_of_prompts, starts, lengths))


def read_parts(trunk: PreTrainedModel, layout: Parts) -> Tensor:
    """Return last hidden states (1, N, H) of the trunk, part after part."""
    found: list[Tensor] = []
    if not layout.prompts:
        found = [_read(trunk, rows).last_hidden_state for rows, _ in layout.parts]
    else:
        read = [
            _read(trunk, rows, use_cache=True, **_positions(trunk, rows.attention_mask.cumsum(dim=1) - 1))
            for rows in layout.prompts
        ]
        cache = _joined([output.past_key_values for output in read])
        mask = _joined_on_the_left([rows.attention_mask for rows in layout.prompts], dim=1)
        lengths = mask.sum(dim=1)
        found = [output.last_hidden_state for output in read]
        for rows, prompt_of in layout.parts:
            steps = torch.arange(rows.input_ids.shape[1], device=mask.device)
            output = _read(
                trunk,
                rows,
                attention_mask=torch.cat([mask[prompt_of], rows.attention_mask], dim=1),
                past_key_values=_rows_of(cache, prompt_of),
                use_cache=True,
                **_positions(trunk, lengths[prompt_of, None] + steps),
            )
            found.append(output.last_hidden_state)
    return torch.cat([states.flatten(0, 1) for states in found])[None]


def _read(trunk: PreTrainedModel, rows: PaddedRows, **inputs: Any) -> Any:
    count_pass(rows.input_ids.numel(), rows.attention_mask.sum())
    defaults = {"attention_mask": rows.attention_mask, "use_cache": False}
    return trunk(input_ids=rows.input_ids, **{**defaults, **inputs})


def _positions(trunk: PreTrainedModel, positions: Tensor) -> dict[str, Tensor]:
    """Return the positions of the tokens as an argument, for a model that takes positions."""
    return {"position_ids": positions.clamp(min=0)} if takes_positions(trunk) else {}


def _joined(caches: Sequence[Cache]) -> Cache:
    """Return the prompts of several caches as one cache, as wide as the widest; masks hide the columns before a shorter
    prompt."""
    found = copy.copy(max(caches, key=lambda cache: cache.get_seq_length()))
    found.layers = [copy.copy(layer) for layer in found.layers]
    for number, layer in enumerate(found.layers):
        for name in ("keys", "values"):
            parts = [getattr(cache.layers[number], name) for cache in caches]
            setattr(layer, name, _joined_on_the_left(parts, dim=2))
    return found


def _joined_on_the_left(parts: Sequence[Tensor], *, dim: int) -> Tensor:
    """Return the rows of several tensors, with zeros before those that are narrower in that dimension."""
    width = max(part.shape[dim] for part in parts)
    filled = []
    for part in parts:
        before = list(part.shape)
        before[dim] = width - part.shape[dim]
        filled.append(torch.cat([part.new_zeros(before), part], dim=dim) if before[dim] else part)
    return torch.cat(filled) if len(filled) > 1 else filled[0]


def _rows_of(cache: Cache, rows: Tensor) -> Cache:
    """Return the prompts' keys and values, a row for each response; the cache itself does not change."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    found.batch_select_indices(rows)
    return found


def _left_padded(ids: Tensor, lengths: Tensor, width: int) -> PaddedRows:
    """Return the first ``lengths`` (n,) tokens of each row of ids, padded on the left with 0 to ``width``, the largest
    length."""
    columns = torch.arange(width, device=ids.device) - (width - lengths[:, None])
    mask = columns >= 0
    return PaddedRows(ids.gather(1, columns.clamp(min=0)).masked_fill(~mask, 0), mask)
