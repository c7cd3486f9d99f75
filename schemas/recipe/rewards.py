"""Rewards and judges of responses."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from vantage.schemas.doubled import doubled
from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import (
    MAX_NAMED,
    Name,
    NonNegative,
    Number,
    Positive,
    is_default,
    is_unset,
)
from vantage.schemas.recipe.terms import AnyTerm

AnswerText = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class MissingEos(Frozen):
    """The score of a response that was truncated before its end-of-sequence token."""

    subtract: Positive | None = None
    """Number that is subtracted from the score."""
    replace: Number | None = None
    """Number that replaces the score."""

    @rule
    def _one_of_two(self) -> None:
        if (self.subtract is None) == (self.replace is None):
            raise ValueError("missing_eos takes either subtract or replace; give exactly one of them")


class Ensemble(Frozen):
    """A combination of a reward's models to one score, in place of their sum."""

    combine: Literal["mean", "min", "mean_minus_std"]
    """``mean``, ``min``imum, or mean − k · standard deviation over the models."""
    k: NonNegative = 1.0
    """Standard deviations that ``mean_minus_std`` subtracts."""
    weight: Number = 1.0
    """The factor of the combined score in the sum of terms."""

    @rule
    def _k_is_of_one_combination(self) -> None:
        if self.k != 1.0 and self.combine != "mean_minus_std":
            raise ValueError(
                f"k={self.k:g} is read by combine: mean_minus_std alone, and combine is {self.combine}; leave k out"
            )


class Reward(Frozen):
    """A reward, which stages use by name to score responses."""

    terms: Annotated[tuple[AnyTerm, ...], Field(min_length=1, max_length=MAX_NAMED)]
    """The terms of the weighted sum."""
    missing_eos: MissingEos | None = None
    """Penalty of a response without an end-of-sequence token; None: no penalty."""
    ensemble: Ensemble | None = Field(None, exclude_if=is_unset)
    """The terms that are models are combined to one score; verifiers are added as ever. None: the weighted sum of all terms."""

    @rule
    def _an_ensemble_has_members(self) -> None:
        if self.ensemble is None:
            return
        members = [term for term in self.terms if term.stage is not None]
        if len(members) < 2:
            raise ValueError(
                f"an ensemble combines two reward models or more, and terms have {len(members)}; add models"
            )
        if weighted := next((term for term in members if term.weight != 1.0), None):
            raise ValueError(
                f"the models of an ensemble count equally, and {weighted.name} has weight={weighted.weight:g}; "
                "leave it out, and set ensemble.weight"
            )
        if shaped := next((term for term in members if term.is_shaped), None):
            raise ValueError(
                f"the models of an ensemble are combined as they are, and {shaped.name} has a clip, an offset, whiten or step_ends; "
                "leave it out"
            )

    @rule
    def _a_whitened_score_is_not_replaced(self) -> None:
        if self.missing_eos is not None and self.missing_eos.replace is not None and self.whitens:
            raise ValueError(
                "missing_eos.replace gives a score in the reward's unit, and a term with whiten has none; use "
                "missing_eos.subtract, or whiten: false"
            )

    @property
    def scores_steps(self) -> bool:
        """Whether any term scores each step of a response."""
        return any(getattr(term, "step_ends", None) is not None for term in self.terms)

    @property
    def whitens(self) -> bool:
        """Whether any score is whitened over a rollout."""
        rules = (rule for term in self.terms for rule in (term, *getattr(term, "scores", {}).values()))
        return any(rule.whiten for rule in rules)

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the terms that an ensemble combines; none without one."""
        return (
            () if self.ensemble is None else tuple(term.name for term in self.terms if term.stage is not None)
        )

    @rule
    def _term_names_are_unique(self) -> None:
        twice = doubled(term.name for term in self.terms)
        if twice:
            raise ValueError(f"terms name {twice[0]!r} twice; add up their weights in one term")


PAIR_TEMPLATE = """Below are a prompt and two responses to it. Which response is better?

[Prompt]
{prompt}

[Response A]
{first}

[Response B]
{second}

Answer with one letter, A or B.
Answer: """
PAIR_FIELDS = ("{prompt}", "{first}", "{second}")
"""What a template of two responses has a place for."""


class Judge(Frozen):
    """The judge of responses: a verifier (right or wrong), a named reward (the higher score wins), or a language model that is
    asked which of two responses is better."""

    verifier: str | None = None
    """One of the recipe's verifiers, or a built-in one: right or wrong."""
    reward: Name | None = None
    """One of the recipe's rewards: which of two responses scores higher."""

    model: Name | None = Field(None, exclude_if=is_unset)
    """A policy that is asked which of two responses is better, in both orders: a stage, ``model``, or another of ``models``. Its
    verdict is the likelier of the two ``answers``; where the orders disagree, the pair is a tie."""
    template: str = Field(PAIR_TEMPLATE, exclude_if=is_default(PAIR_TEMPLATE))
    """Question to the model: a text with ``{prompt}``, ``{first}`` and ``{second}``. If the model has a chat template, it
    is the user's turn."""
    answers: tuple[AnswerText, ...] = Field(
        ("A", "B"), min_length=2, max_length=2, exclude_if=is_default(("A", "B"))
    )
    """Answers of the model that prefer the first and the second response: their log-probabilities as the beginning of its
    answer are compared."""

    @property
    def kind(self) -> Literal["verifier", "reward", "model"]:
        """The field that names it."""
        if self.verifier is not None:
            return "verifier"
        return "reward" if self.reward is not None else "model"

    @rule
    def _of_one_kind(self) -> None:
        if [self.verifier, self.reward, self.model].count(None) != 2:
            raise ValueError("a judge is a verifier, a reward or a model; give exactly one of them")

    @rule
    def _a_model_is_asked_about_both_responses(self) -> None:
        asked = (self.template, self.answers) != (PAIR_TEMPLATE, ("A", "B"))
        if self.model is None and asked:
            raise ValueError(
                "template and answers are of a judge that is a model; leave them out, or name a model"
            )
        missing = [field for field in PAIR_FIELDS if field not in self.template]
        if missing:
            raise ValueError(
                f"template has no {' and no '.join(missing)}; write each field where its text belongs"
            )
        if self.answers[0] == self.answers[1]:
            raise ValueError(f"answers are {self.answers[0]!r} twice; give the two responses different ones")
