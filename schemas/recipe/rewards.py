"""Rewards and judges of responses."""

from typing import Annotated

from pydantic import Field

from schemas.frozen import Frozen, rule
from schemas.recipe.fields import (
    MAX_NAMED,
    Name,
    Number,
    Positive,
)
from schemas.recipe.terms import AnyTerm


class MissingEos(Frozen):
    """The score of a response that was truncated before its end-of-sequence token."""

    subtract: Positive | None = None
    """Subtracted from the score."""
    replace: Number | None = None
    """Replaces the score."""

    @rule
    def _one_of_two(self) -> None:
        if (self.subtract is None) == (self.replace is None):
            raise ValueError("missing_eos takes either subtract or replace; give exactly one of them")


class Reward(Frozen):
    """A reward, which stages use by name to score responses."""

    terms: Annotated[tuple[AnyTerm, ...], Field(min_length=1, max_length=MAX_NAMED)]
    """The terms of the weighted sum."""
    missing_eos: MissingEos | None = None
    """Penalty of a response without an end-of-sequence token; None: no penalty."""

    @rule
    def _term_names_are_unique(self) -> None:
        names = [term.name for term in self.terms]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"terms name {twice!r} twice; add up their weights in one term")


class Judge(Frozen):
    """The judge of responses: a verifier (right or wrong) or a named reward (the higher score wins)."""

    verifier: str | None = None
    """One of the recipe's verifiers, or a built-in one: right or wrong."""
    reward: Name | None = None
    """One of the recipe's rewards: which of two responses scores higher."""

    @rule
    def _one_of_two(self) -> None:
        if (self.verifier is None) == (self.reward is None):
            raise ValueError("a judge is either a verifier or a reward; give exactly one of them")
