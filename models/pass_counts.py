"""What the passes of this process computed: counts, which nothing else on the machine disturbs.

A pass reads rows of one length, so that what stands behind a shorter text is computed and thrown away.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class PassCounts:
    """Passes of networks forward only: a backward pass is of the same positions."""

    passes: int = 0
    """Over whole texts; the sampler's are counted below."""
    positions: int = 0
    """Tokens and padding that these computed."""
    tokens: int | Tensor = 0
    """Of these, tokens; on the device until they are asked for, so that counting waits for nothing."""
    logits_rows: int = 0
    """Tokens whose logits were computed, V numbers each."""
    logits_rows_again: int = 0
    """Tokens whose logits were computed once more for the backward pass."""
    prompt_positions: int = 0
    """Tokens and padding of prompts that the sampler computed."""
    prompt_tokens: int = 0
    """Tokens of the distinct prompts of its batches."""
    sampled_rows: int = 0
    """Rows that the sampler computed, token by token, after the prompts."""
    ended_rows: int = 0
    """Of these, rows of responses that had ended."""


_counts = PassCounts()


def count_pass(positions: int, tokens: Tensor) -> None:
    """Count a pass over so many positions, of which so many hold a token."""
    _counts.passes += 1
    _counts.positions += positions
    _counts.tokens = _counts.tokens + tokens


def count_logits(tokens: int, *, again: bool = False) -> None:
    """Count the logits of so many tokens."""
    if again:
        _counts.logits_rows_again += tokens
    else:
        _counts.logits_rows += tokens


def count_prompts(positions: int, tokens: int) -> None:
    """Count prompts of a batch that the sampler reads."""
    _counts.prompt_positions += positions
    _counts.prompt_tokens += tokens


def count_sampled(rows: int, *, ended: int) -> None:
    """Count the rows that the sampler computes for one more token."""
    _counts.sampled_rows += rows
    _counts.ended_rows += ended


def taken_counts() -> PassCounts:
    """What was counted since the last call."""
    global _counts
    taken, _counts = _counts, PassCounts()
    return taken
