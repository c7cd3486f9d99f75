"""Recipe class of the stage that selects prompts by their pass rate in collected responses."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import Count, Name, Number, Probability, is_default, is_unset
from vantage.schemas.recipe.stage import Stage

TermName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""The name of a reward's term, or ``TERM.NAME`` for one of its named scores: as the curve ``score_mean_TERM`` has it."""


class PromptSelection(Stage):
    """The training prompts whose pass rate in collected responses lies in a range: a dataset of prompts.

    Under ``data`` it is written ``NAME: {from: COLLECTION, pass_rate: [LOW, HIGH]}``; its prompts are then the collection's.
    Held-out prompts all stay, so that validation and tests measure the same prompts before and after.
    """

    kind: Literal["prompt_selection"]
    rollouts: Name
    """The ``rollout_collection`` stage whose training responses are counted; under ``data`` it is called ``from``."""
    prompts: Name
    """The dataset whose rows are selected: that of the collection."""
    pass_rate: Annotated[tuple[Probability, ...], Field(min_length=2, max_length=2)]
    """Lowest and highest pass rate of a prompt that is kept, both included. 0 and 1 leave a group without contrast (DAPO)."""
    passes_above: Number = Field(0.0, exclude_if=is_default(0.0))
    """A response passes if its score is above this."""
    term: TermName | None = Field(None, exclude_if=is_unset)
    """The term of the reward, or its named score (``TERM.NAME``), that decides. None: the weighted sum of all terms, without the rule for a missing EOS."""

    @rule
    def _the_range_is_not_empty(self) -> None:
        low, high = self.pass_rate  # it has two numbers, or the field itself was refused
        if low > high:
            raise ValueError(f"pass_rate=[{low:g}, {high:g}] is an empty range; write the lower bound first")


class DifficultyReport(Frozen):
    """A policy stage's report about its training prompts: those that have become too easy, and those that stay impossible."""

    after: Count = 2
    """Groups of responses to a prompt after which it is judged: too easy if all responses of the last ones pass, impossible if none
    of all so far did."""
    passes_above: Number = 0.0
    """A response passes if its score is above this."""
    term: TermName | None = Field(None, exclude_if=is_unset)
    """The term of the reward, or its named score (``TERM.NAME``), that decides. None: the weighted sum of all terms, without the rule for a missing EOS."""
