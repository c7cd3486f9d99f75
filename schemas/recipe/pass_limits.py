"""The bounds of one forward pass: ``microbatch_size`` and ``microbatch_tokens``, which change memory and never a result."""

from dataclasses import dataclass, replace

from vantage.schemas.frozen import Frozen


@dataclass(frozen=True)
class PassLimits:
    """Largest size of one forward pass; both bounds hold. None: no bound."""

    rows: int | None = None
    """Number of sequences; where pairs, or prompts with all their responses, go through the model together, the number of
    these."""
    tokens: int | None = None
    """Positions: sequences times the longest of them, padding included. A row that has more makes a pass by itself."""
    share_prompts: bool = True
    """Whether a pass may read a prompt once for several responses, through its keys and values. Not allowed if layers
    are computed again for the backward pass, since they would add the keys and values twice."""

    def or_rows(self, rows: int) -> "PassLimits":
        """Return these limits, with ``rows`` as the bound on rows where there is none."""
        return replace(self, rows=self.rows or rows)

    def rows_of(self, positions: int, rows: int) -> int:
        """Return the most of ``rows`` rows, each with ``positions`` positions, that a pass may have; at least 1.

        >>> PassLimits(rows=8, tokens=1000).rows_of(150, 100)
        6
        """
        most = rows if self.rows is None else min(rows, self.rows)
        return max(1, most if self.tokens is None else min(most, self.tokens // positions))


UNLIMITED = PassLimits()
"""Limits without bounds."""


class FoundLimits(Frozen):
    """The most positions for which memory suffices, found by a stage before its first step."""

    tokens: int
    """Positions of a pass that trains, or that only reads in a stage that trains nothing."""
    sampled_tokens: int | None = None
    """Positions of responses that are sampled side by side; None: the stage does not sample."""

    @property
    def described(self) -> str:
        """Return the limits in words: ``found: passes of at most 65,536 positions``."""
        sampled = "" if self.sampled_tokens is None else f", {self.described_sampling}"
        return f"found: passes of at most {self.tokens:,} positions{sampled}"

    @property
    def described_sampling(self) -> str:
        """Return the limit of a stage that samples, in words."""
        return f"responses of {self.sampled_tokens or 0:,} sampled side by side"
