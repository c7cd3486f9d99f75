"""Servers that score responses: language models that judge, and reward servers."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from vantage.schemas.doubled import doubled
from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.called_server import CalledServer
from vantage.schemas.recipe.fields import (
    MAX_NAMED,
    MAX_NUMBER,
    Count,
    CountOrZero,
    Integer,
    Name,
    NonNegative,
    Number,
    Positive,
    is_default,
    is_unset,
)

SCORE = "score"
"""Name of the one score of a server without named ones."""

STOP: Literal["stop"] = "stop"

RUBRIC_TEMPLATE = """Below are a prompt and a response to it. Judge the response.

[Prompt]
{prompt}

[Response]
{response}

Give a number for each of the following:
{criteria}
Answer with one line for each of them: its name, a colon, and the number.
"""
PAIR_RUBRIC_TEMPLATE = """Below are a prompt and two responses to it. Compare the responses.

[Prompt]
{prompt}

[Response A]
{first}

[Response B]
{second}

Decide which response is better by each of the following:
{criteria}
Answer with one line for each of them: its name, a colon, and A, B or tie.
"""
RUBRIC_FIELDS, PAIR_RUBRIC_FIELDS = ("{prompt}", "{response}"), ("{prompt}", "{first}", "{second}")
"""The fields for which a prompt of one response, and one of two, has a place."""

COMPLETION_TOKENS = "max_completion_tokens"
"""Field of a request that bounds an answer, where a server refuses ``max_tokens``: thinking counts too."""

_OWN_FIELDS = frozenset(
    {
        *("model", "messages", "temperature", "max_tokens", "n", "stream", "stream_options"),
        *("tools", "functions", "api_key"),
    }
)
"""Fields of a request that the recipe's other fields set, or that would change the form of the answer."""

Criterion = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
MOST_LEVELS = 8
"""Most mappings and lists within one another in a setting of a request."""
MOST_CHARACTERS = 20_000
"""Most characters of a mapping or a list in a request, as JSON."""


Setting = (
    Annotated[str, StringConstraints(max_length=2000)] | bool | Integer | Number | list[Any] | dict[str, Any]
)


class Budget(Frozen):
    """The most that a stage may spend on a judge, over all of its attempts."""

    tokens: Count | None = None
    """Tokens of questions and answers together."""
    cost: Positive | None = None
    """Cost, in the currency of ``price``."""

    @rule
    def _bounds_something(self) -> None:
        if self.tokens is None and self.cost is None:
            raise ValueError("a budget gives tokens or cost; give one of them, or leave budget out")


class Price(Frozen):
    """Price of a judge's tokens."""

    question: NonNegative
    """Price of one million tokens of questions."""
    answer: NonNegative
    """Price of one million tokens of answers."""


class Served(CalledServer):
    """Fields of every server that scores."""

    name: Name
    """Name of the term in metrics."""
    unreadable: Number | Literal["stop"] = STOP
    """Treatment of a response whose answers cannot be read: ``stop`` ends the stage; a number becomes each of its scores, also where
    the server refuses the question and answers others."""
    ask_again: CountOrZero = 2
    """Most repetitions of a question whose answer cannot be read."""

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of its scores; empty: it has one score, without a name of its own."""
        raise NotImplementedError

    def question_fields(self) -> dict[str, Any]:
        """Return the values that the questions depend on beside the texts, as JSON: servers with equal ones are asked equal questions."""
        raise NotImplementedError


class JudgeServer(Served):
    """A language model behind an OpenAI-compatible endpoint that judges each response by a rubric."""

    name: Name = "judge"
    model: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """The model's name at the server."""
    criteria: dict[Name, Criterion] = Field(default_factory=dict, max_length=MAX_NAMED)
    """Name of a score → description of what it measures. Empty: one score for the whole response."""
    against: Literal["answer"] | None = None
    """``answer``: the response is compared with the row's ``answer``, in both orders. A score is 1 if the response is better, ½ for a
    tie, 0 if it is worse: the mean of both orders. None: the response is judged alone."""
    prompt: str | None = None
    """Question to the model: a text with ``{prompt}`` and ``{response}`` (with ``against``: ``{prompt}``, ``{first}`` and ``{second}``),
    and where wanted ``{answer}`` and ``{criteria}``. None: Vantage's own rubric."""
    scale: Annotated[tuple[Number, ...], Field(min_length=2, max_length=2)] | None = None
    """Lowest and highest number that the judge may give; the score is the number itself. None: 1 to 10."""
    temperature: NonNegative | None = 0.0
    """Sampling temperature; None: the server's own."""
    max_answer_tokens: Count = 512
    """Most tokens of an answer, sent as ``max_tokens``. Not sent where ``request`` has ``max_completion_tokens``."""
    request: dict[str, Setting] = Field(default_factory=dict, max_length=MAX_NAMED)
    """More fields of the request, also nested ones: ``{seed: 1, chat_template_kwargs: {enable_thinking: false}}``."""
    price: Price | None = Field(None, exclude_if=is_unset)
    """Price of the model's tokens, for the curve ``judge_cost`` and for ``budget.cost``. In no stage key."""
    budget: Budget | None = Field(None, exclude_if=is_unset)
    """Most that the stage may spend; it ends when that is spent, and goes on with a larger budget. In no stage key."""

    @property
    def score_names(self) -> tuple[str, ...]:
        """The criteria."""
        return tuple(self.criteria)

    @property
    def template(self) -> str:
        """The question, with places for texts."""
        if self.prompt is not None:
            return self.prompt
        return RUBRIC_TEMPLATE if self.against is None else PAIR_RUBRIC_TEMPLATE

    def in_key(self) -> dict[str, Any]:
        """Return the fields that decide the scores, as JSON; Vantage's own question is included as text.

        The question lists the criteria in the recipe's order, and the names of a mapping are sorted in a key. So another order than
        the sorted one is a part of its own. So is that of names within a setting of the request: a server may write an answer's
        fields in the order of its ``response_format``.
        """
        names = list(self.criteria)
        is_reordered = "{criteria}" in self.template and names != sorted(names)
        order: dict[str, Any] = {"criteria_order": names} if is_reordered else {}
        if reordered := {name: json.dumps(each) for name, each in self.request.items() if _is_unsorted(each)}:
            order["request_order"] = reordered
        return {**super().in_key(), "prompt": self.template, **order}

    @property
    def most_answer_tokens(self) -> int:
        """The most tokens of an answer."""
        given = self.request.get(COMPLETION_TOKENS)
        return given if type(given) is int and given > 0 else self.max_answer_tokens

    def question_fields(self) -> dict[str, Any]:
        """Return the fields of the request, and what its text is made of."""
        listed = [list(each) for each in self.criteria.items()] if "{criteria}" in self.template else []
        shown = self.bounds if "{criteria}" in self.template and self.against is None else ()
        limit = None if COMPLETION_TOKENS in self.request else self.max_answer_tokens
        sampling = [self.temperature, limit, self.request]
        return {"judge": [self.model, self.template, self.against, listed, list(shown), *sampling]}

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest number that the judge may give."""
        low, high = self.scale or (1.0, 10.0)
        return low, high

    @rule
    def _the_scale_ascends(self) -> None:
        if self.scale is not None and self.against is not None:
            raise ValueError("scale is read only without against, whose scores are 0, ½ and 1; leave it out")
        if self.scale is not None and self.scale[0] >= self.scale[1]:
            raise ValueError(
                f"scale={list(self.scale)} does not ascend; give the lowest number, then the highest"
            )

    @rule
    def _the_prompt_shows_the_response(self) -> None:
        needed = RUBRIC_FIELDS if self.against is None else PAIR_RUBRIC_FIELDS
        if missing := [field for field in needed if field not in self.template]:
            raise ValueError(
                f"prompt has no {' and no '.join(missing)}; write each field where its text belongs"
            )
        if self.criteria and "{criteria}" not in self.template:
            unnamed = [name for name in self.criteria if not re.search(rf"\b{name}\b", self.template)]
            if unnamed:
                raise ValueError(
                    f"prompt mentions neither {{criteria}} nor {unnamed[0]}, whose score is read from the answer; write one of them"
                )

    @rule
    def _the_request_is_ours(self) -> None:
        if taken := sorted(_OWN_FIELDS & self.request.keys()):
            raise ValueError(
                f"request.{taken[0]} is set by other fields of the judge, or changes the answer's form; leave it out"
            )

    @rule
    def _the_request_is_bounded(self) -> None:
        nested = {name: each for name, each in self.request.items() if isinstance(each, dict | list)}
        for name, value in nested.items():
            _require_json(value, f"request.{name}", MOST_LEVELS)
            if (size := len(json.dumps(value))) > MOST_CHARACTERS:
                raise ValueError(
                    f"request.{name} has {size} characters as JSON, and may have {MOST_CHARACTERS}; leave something out"
                )

    @rule
    def _a_cost_has_a_price(self) -> None:
        if self.budget is not None and self.budget.cost is not None and self.price is None:
            raise ValueError(f"budget.cost={self.budget.cost:g} needs the price of tokens; add price")


def _require_json(value: Any, path: str, levels: int) -> None:
    """Raise ValueError if a setting is not JSON with numbers of usual size, or has more than ``levels`` levels."""
    if isinstance(value, dict | list):
        if levels == 0:
            raise ValueError(
                f"{path} is within {MOST_LEVELS} mappings and lists, which is the most; make the setting flatter"
            )
        if isinstance(value, dict) and (odd := [name for name in value if not isinstance(name, str)]):
            raise ValueError(f"{path} has the name {odd[0]!r}, which is no text; write it in quotes")
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _require_json(inner, f"{path}.{name}", levels - 1)
    elif isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:  # NaN is neither
        shown = f"{value:g}" if isinstance(value, float) else f"a number of {value.bit_length()} bits"
        raise ValueError(f"{path} is {shown}, and must be between -{MAX_NUMBER:g} and {MAX_NUMBER:g}")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{path} is a {type(value).__name__}; use texts, numbers, true, false and null")


def _is_unsorted(value: Any) -> bool:
    """Return whether the names of a value's mappings are in another order than the sorted one."""
    return json.dumps(value) != json.dumps(value, sort_keys=True)


class RewardServer(Served):
    """A server that computes scores of responses, a batch at a time."""

    name: Name = "http"
    version: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """Text that names what the server computes; change it when that changes, so that stages run again."""
    names: Annotated[tuple[Name, ...], Field(max_length=MAX_NAMED)] = ()
    """Names of the scores that the server gives each response. Empty: it gives one number."""
    batch: Count = Field(16, exclude_if=is_default(16))
    """Most responses in one request. In no stage key."""

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names."""
        return self.names

    def question_fields(self) -> dict[str, Any]:
        """Return the version and the names."""
        return {"http": [self.version, list(self.names)]}

    @rule
    def _names_differ(self) -> None:
        twice = doubled(self.names)
        if twice:
            raise ValueError(f"names has {twice[0]!r} twice; name each score once")
