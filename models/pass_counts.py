"""What the passes of this process computed: counts, which nothing else on the machine disturbs.

A pass reads rows of one length, so that what stands behind a shorter text is computed and thrown away.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class PassCounts:
    """Passes of networks over whole texts, forward only: a backward pass is of the same positions. Sampling does not count."""

    passes: int = 0
    positions: int = 0
    """Tokens and padding that were computed."""
    tokens: int | Tensor = 0
    """Of these, tokens; on the device until they are asked for, so that counting waits for nothing."""


_counts = PassCounts()


def count_pass(positions: int, tokens: Tensor) -> None:
    """Count a pass over so many positions, of which so many hold a token."""
    _counts.passes += 1
    _counts.positions += positions
    _counts.tokens = _counts.tokens + tokens


def taken_counts() -> PassCounts:
    """What was counted since the last call."""
    global _counts
    taken, _counts = _counts, PassCounts()
    return taken
