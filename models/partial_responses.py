"""The responses of a batch while they are drawn, token by token."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.models.stop_strings import StopStrings

Response = tuple[list[int], bool, list[float]]
"""Ids, whether the response ended, and the log-probability of each id."""


class Endings:
    """Find the rows of a batch that end, token by token."""

    def __init__(
        self, eos_token_ids: Collection[int], strings: StopStrings | None, count: int, device: torch.device
    ) -> None:
        self.eos = torch.tensor(sorted(eos_token_ids), dtype=torch.long, device=device)
        self.has_strings = strings is not None
        self._strings = strings
        self._said: list[list[int]] = [[] for _ in range(count)]

    def after(self, tokens: Tensor, rows: Tensor, active: Tensor) -> Tensor:
        """Return which of the active rows end with these tokens; all (b,). ``rows`` are the rows' numbers in the batch."""
        ends = torch.isin(tokens, self.eos)
        if self.has_strings:
            said = zip(tokens.tolist(), rows.tolist(), active.tolist(), strict=True)
            completes = [is_active and self.completes(token, row) for token, row, is_active in said]
            ends = ends | torch.tensor(completes, device=ends.device)
        return ends & active

    def completes(self, token: int, row: int) -> bool:
        """Return whether the next token of a row completes a stop string."""
        assert self._strings is not None
        self._said[row].append(token)
        return self._strings.complete(self._said[row])


@dataclass(eq=False)
class PartialResponses:
    """B partial responses; b of them are still computed."""

    uniform: Tensor | None
    """(B, most): numbers in [0, 1) that draw the tokens; None: the likeliest tokens are taken."""
    ids: Tensor
    """(B, most)."""
    logprobs: Tensor
    """(B, most)."""
    lengths: Tensor
    """(B,)."""
    ended: Tensor
    """(B,)."""
    rows: Tensor
    """(b,): the response of each row."""
    active: Tensor
    """(b,): rows that have not ended."""
    tokens: Tensor
    """(b,): the last token of each row, which is not in the cache yet."""
    prompt_lengths: list[int]
    """(b)."""
    width: int
    """Width to which prompts are padded on the left."""
    drawn: int = 0
    """Number of tokens drawn for each row so far."""
    is_done: bool = False
    """Whether nothing is left to be drawn."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        uniform: Tensor | None,
        *,
        most: int,
        pad_token_id: int,
        device: torch.device,
    ) -> "PartialResponses":
        """Return empty responses to these prompts, of at most ``most`` tokens."""
        count, lengths = len(prompts), [len(prompt) for prompt in prompts]
        rows = torch.arange(count, device=device)
        return cls(
            uniform=None if uniform is None else uniform.to(device),
            ids=torch.full((count, most), pad_token_id, device=device),
            logprobs=torch.zeros(count, most, device=device),
            lengths=torch.full((count,), most, device=device),
            ended=torch.zeros(count, dtype=torch.bool, device=device),
            rows=rows,
            active=torch.ones_like(rows, dtype=torch.bool),
            tokens=torch.zeros_like(rows),
            prompt_lengths=lengths,
            width=max(lengths),
        )

    @property
    def most(self) -> int:
        """Most tokens of a response."""
        return self.ids.shape[1]

    def draw(self, logits: Tensor, *, temperature: float, endings: Endings) -> None:
        """Draw the next token of each row from softmax(logits (b, V) / temperature)."""
        step, rows = self.drawn, self.rows
        distribution = log_distribution(logits, temperature)
        uniform = None if self.uniform is None else self.uniform[rows, step]
        self.tokens = tokens_of(distribution, uniform)
        self.ids[rows, step] = torch.where(self.active, self.tokens, self.ids[rows, step])
        self.logprobs[rows, step] = distribution.gather(1, self.tokens[:, None])[:, 0]
        ends = endings.after(self.tokens, rows, self.active)
        self.lengths[rows] = torch.where(ends, step + 1, self.lengths[rows])
        self.ended[rows] |= ends
        self.active &= ~ends
        self.drawn += 1

    def keep(self, kept: Sequence[int], places: Tensor) -> None:
        """Drop all rows but those at these places; the places are given twice, on the host and on the device."""
        self.prompt_lengths = [self.prompt_lengths[place] for place in kept]
        self.rows, self.tokens, self.active = self.rows[places], self.tokens[places], self.active[places]

    def responses(self) -> list[Response]:
        """Return the drawn responses, in the order of the prompts."""
        columns = (each.tolist() for each in (self.ids, self.ended, self.logprobs, self.lengths))
        return [
            (ids[:length], is_ended, logprobs[:length])
            for ids, is_ended, logprobs, length in zip(*columns, strict=True)
        ]


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Return log softmax(logits / temperature) over the last dimension, in float32."""
    return (logits.float() / temperature).log_softmax(dim=-1)


def tokens_of(distribution: Tensor, uniform: Tensor | None) -> Tensor:
    """Return tokens (B,) from log-probabilities (B, V): the likeliest, or by inversion the first whose cumulative probability
    exceeds the row's uniform number (B,).

    The sum is in float64, since float32 would lose the rare tokens of a large vocabulary.
    """
    if uniform is None:
        return distribution.argmax(dim=-1)
    cumulative = distribution.double().exp().cumsum(dim=-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=distribution.shape[-1] - 1)
