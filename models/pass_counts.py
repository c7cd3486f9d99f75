"""Count the work of a thread's passes; other programs on the machine do not change these counts.

All rows of a pass have one length, so padding after a shorter text is computed and discarded.
"""

import threading
from dataclasses import dataclass

from torch import Tensor


@dataclass
class PassCounts:
    """Counts of forward passes; a backward pass has the same positions."""

    passes: int = 0
    """Passes over whole texts; the sampler's passes are counted below."""
    positions: int = 0
    """Tokens and padding in these passes."""
    tokens: int | Tensor = 0
    """Number of tokens among the positions. It stays on the device until it is read, so that counting does not wait for
    the device."""
    logits_rows: int = 0
    """Tokens whose logits were computed, V numbers each."""
    logits_rows_again: int = 0
    """Tokens whose logits were computed once more for the backward pass."""
    prompt_positions: int = 0
    """Tokens and padding of prompts that the sampler computed."""
    prompt_tokens: int = 0
    """Tokens of the distinct prompts of the sampler's batches."""
    sampled_rows: int = 0
    """Rows that the sampler computed, token by token, after the prompts."""
    ended_rows: int = 0
    """Number of these rows whose response had ended."""
    graphs_captured: int = 0
    """Steps of the sampler that were captured (`vantage.models.replayed_steps`)."""
    graph_replays: int = 0
    """Tokens for whole batches that captured steps drew."""
    graph_fallbacks: int = 0
    """Number of times that the plain loop sampled a batch, or the rest of one, although captured steps should have."""


class _Counting(threading.local):
    """Counts of each thread."""

    def __init__(self) -> None:
        self.now = PassCounts()


_counting = _Counting()


def count_pass(positions: int, tokens: Tensor) -> None:
    """Count a pass over this many positions; ``tokens`` of them hold a token."""
    counts = _counting.now
    counts.passes += 1
    counts.positions += positions
    counts.tokens = counts.tokens + tokens


def count_logits(tokens: int, *, again: bool = False) -> None:
    """Count the logits of this many tokens."""
    if again:
        _counting.now.logits_rows_again += tokens
    else:
        _counting.now.logits_rows += tokens


def count_prompts(positions: int, tokens: int) -> None:
    """Count prompts of a batch that the sampler reads."""
    _counting.now.prompt_positions += positions
    _counting.now.prompt_tokens += tokens


def count_sampled(rows: int, *, ended: int) -> None:
    """Count the rows that the sampler computes for one more token."""
    _counting.now.sampled_rows += rows
    _counting.now.ended_rows += ended


def count_captured() -> None:
    """Count a step that was captured."""
    _counting.now.graphs_captured += 1


def count_replayed() -> None:
    """Count a step that was replayed."""
    _counting.now.graph_replays += 1


def count_fallback() -> None:
    """Count a batch that captured steps did not sample to its end."""
    _counting.now.graph_fallbacks += 1


def taken_counts() -> PassCounts:
    """Return this thread's counts since the last call."""
    taken, _counting.now = _counting.now, PassCounts()
    return taken


def add_counts(others: PassCounts) -> None:
    """Add the counts of another thread that worked for this thread."""
    for name, value in vars(others).items():
        setattr(_counting.now, name, getattr(_counting.now, name) + value)
