"""A language model of the run that judges responses: the stage asks it itself, without a server."""

from typing import Annotated, Any, Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import MAX_NAMED, Integer, Name, Number, is_default
from vantage.schemas.recipe.served_scores import (
    PAIR_RUBRIC_FIELDS,
    RUBRIC_FIELDS,
    SCORE,
    STOP,
    Criterion,
)

JUDGING_TEMPLATE = """Below are a prompt and a response to it. Judge the response.

[Prompt]
{prompt}

[Response]
{response}

{criterion}
Answer with one number from {low} to {high}, where {high} is best.
Answer: """
JUDGING_PAIR_TEMPLATE = """Below are a prompt and two responses to it. Compare the responses.

[Prompt]
{prompt}

[Response A]
{first}

[Response B]
{second}

{criterion}
Answer with one letter, A or B.
Answer: """
DEFAULT_SCALE = (1, 5)
MOST_NUMBERS = 100
"""Most numbers of a scale: the model's probability of each of them is computed."""
PAIR_LABELS = ("A", "B")
"""Answers that prefer the first and the second response."""


class JudgingModel(Frozen):
    """A language model of the run that judges each response by the probabilities that it gives the numbers of a scale."""

    name: Name = "judge"
    """Name of the term in metrics."""
    model: Name
    """A policy: a stage, ``model``, or another of ``models``. With ``url`` it is the name of a model at a server."""
    criteria: dict[Name, Criterion] = Field(default_factory=dict, max_length=MAX_NAMED)
    """Name of a score → question about it; each is asked alone. Empty: one question about the whole response."""
    against: Literal["answer"] | None = None
    """``answer``: the response is compared with the row's ``answer``, in both orders. A score is the probability of the letter that
    prefers the response, of both letters: the mean of both orders. None: the response is judged alone."""
    prompt: str | None = None
    """Question to the model: a text with ``{prompt}`` and ``{response}`` (with ``against``: ``{prompt}``, ``{first}`` and ``{second}``),
    and where wanted ``{criterion}``, ``{answer}``, ``{low}`` and ``{high}``. If the model has a chat template, it is the user's
    turn. None: Vantage's own question."""
    scale: Annotated[tuple[Integer, ...], Field(min_length=2, max_length=2)] | None = None
    """Lowest and highest number that the judge may give. A score is the mean of all whole numbers from one to the other, weighted
    by their probabilities. None: 1 to 5."""
    least_probability: Annotated[float, Field(ge=0.0, lt=1.0, strict=True)] = Field(
        0.0, exclude_if=is_default(0.0)
    )
    """Least probability of all numbers (or both letters) together. A model that would answer something else gives less, and its
    answer counts as unreadable. 0: every answer is read."""
    unreadable: Number | Literal["stop"] = Field(STOP, exclude_if=is_default(STOP))
    """Treatment of a response with an unreadable answer: ``stop`` ends the stage; a number becomes each of its scores."""

    @property
    def score_names(self) -> tuple[str, ...]:
        """The criteria; empty: it has one score, without a name of its own."""
        return tuple(self.criteria)

    @property
    def questions(self) -> dict[str, str]:
        """Name of a score → question about it."""
        whole = "How good is the response?" if self.against is None else "Which response is better?"
        return self.criteria or {SCORE: whole}

    @property
    def template(self) -> str:
        """The question, with places for texts."""
        if self.prompt is not None:
            return self.prompt
        return JUDGING_TEMPLATE if self.against is None else JUDGING_PAIR_TEMPLATE

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest number that the judge may give."""
        low, high = self.scale or DEFAULT_SCALE
        return low, high

    @property
    def labels(self) -> tuple[str, ...]:
        """The answers whose probabilities are read."""
        low, high = self.bounds
        return PAIR_LABELS if self.against is not None else tuple(map(str, range(low, high + 1)))

    @property
    def label_scores(self) -> tuple[float, ...]:
        """The score of each answer."""
        return (1.0, 0.0) if self.against is not None else tuple(map(float, self.labels))

    def in_key(self, digest: str) -> dict[str, Any]:
        """Return the fields that decide the scores, as JSON, with the model's content digest for its name; Vantage's own
        question is included as text."""
        return {**self.model_dump(mode="json"), "model": digest, "prompt": self.template}

    @rule
    def _the_scale_ascends(self) -> None:
        if self.scale is None:
            return
        low, high = self.scale
        if self.against is not None:
            raise ValueError(
                "scale is read only without against, whose answers are two letters; leave it out"
            )
        if low >= high:
            raise ValueError(
                f"scale=[{low}, {high}] does not ascend; give the lowest number, then the highest"
            )
        if high - low >= MOST_NUMBERS:
            raise ValueError(
                f"scale=[{low}, {high}] has {high - low + 1} numbers, and each has a probability to be computed; give at most "
                f"{MOST_NUMBERS}"
            )

    @rule
    def _the_prompt_shows_the_response(self) -> None:
        needed = RUBRIC_FIELDS if self.against is None else PAIR_RUBRIC_FIELDS
        if self.criteria:
            needed = (*needed, "{criterion}")
        if missing := [field for field in needed if field not in self.template]:
            raise ValueError(
                f"prompt has no {' and no '.join(missing)}; write each field where its text belongs"
            )

    @rule
    def _unreadable_answers_can_occur(self) -> None:
        if self.unreadable != STOP and not self.least_probability:
            raise ValueError(
                f"unreadable={self.unreadable:g} is read only where an answer can be unreadable; give least_probability, or leave it out"
            )
