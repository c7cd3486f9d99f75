"""Count the questions of a stage to judges, reward servers and teachers, with their requests, tokens and cost."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vantage.schemas.recipe.called_server import TeacherServer
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.served_scores import SCORE, JudgeServer, RewardServer, Served
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.steps import rewards_read

CHARACTERS_OF_A_TOKEN = 4.0
"""Approximate characters per token of English: no tokenizer counts a judge's question."""
LINE_OF_AN_ANSWER = 8.0
"""Approximate tokens of a line ``correct: 7``."""
_MILLION = 1e6


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The questions of a stage to one server. Equal questions are asked once, but counted each time here."""

    server: Served | TeacherServer
    responses: float
    """Number of responses that the server scores."""
    prompt: float
    """Mean tokens of a prompt."""
    response: float
    """Mean tokens of a response."""

    @property
    def questions(self) -> float:
        """Return the number of questions: one for each response, or two if responses are compared in both orders."""
        is_compared = isinstance(self.server, JudgeServer) and self.server.against is not None
        return self.responses * (2 if is_compared else 1)

    @property
    def requests(self) -> float:
        """Return the number of requests."""
        at_once = self.server.batch if isinstance(self.server, RewardServer) else 1
        return math.ceil(self.questions / at_once)

    @property
    def question_tokens(self) -> float | None:
        """Return the approximate tokens of all questions; None: the server counts none.

        The answer to which a response is compared is assumed to be as long as the response.
        """
        if not isinstance(self.server, JudgeServer):
            return None
        written = len(self.server.template) + sum(map(len, self._criteria.values()))
        texts = self.prompt + self.response * (1 if self.server.against is None else 2)
        return self.questions * (written / CHARACTERS_OF_A_TOKEN + texts)

    @property
    def answer_tokens(self) -> tuple[float, float] | None:
        """Return the fewest tokens of all answers (a line for each criterion), and the most; None: the server counts
        none."""
        if not isinstance(self.server, JudgeServer):
            return None
        most = self.server.most_answer_tokens
        shortest = min(LINE_OF_AN_ANSWER * len(self._criteria), most)
        return self.questions * shortest, self.questions * most

    @property
    def cost(self) -> tuple[float, float] | None:
        """Return the cost with the shortest and the longest answers; None: the recipe gives no price."""
        tokens = self.question_tokens, self.answer_tokens
        if not isinstance(self.server, JudgeServer) or self.server.price is None or None in tokens:
            return None
        price, (asked, answered) = self.server.price, tokens
        assert asked is not None and answered is not None
        low, high = ((asked * price.question + each * price.answer) / _MILLION for each in answered)
        return low, high

    @property
    def least_seconds(self) -> float | None:
        """Return the fewest seconds that the limit of requests in a minute allows; None: there is no limit."""
        limit = self.server.requests_per_minute
        return None if limit is None else 60.0 * self.requests / limit

    @property
    def _criteria(self) -> dict[str, str]:
        criteria: dict[str, str] = getattr(self.server, "criteria", {})
        return criteria or {SCORE: ""}

    def as_json(self) -> dict[str, Any]:
        """Return the output of ``vantage estimate --json``."""
        return {
            "server": self.server.name,
            "model": getattr(self.server, "model", None),
            "questions": self.questions,
            "requests": self.requests,
            "question_tokens": self.question_tokens,
            "answer_tokens": self.answer_tokens,
            "cost": self.cost,
            "least_seconds": self.least_seconds,
        }


def asked_by(
    recipe: Recipe, rewards: Sequence[str], *, responses: float, prompt: float, response: float
) -> Iterator[Asked]:
    """Yield the questions to the servers of these rewards about this many responses."""
    for reward in rewards:
        for term in recipe.rewards[reward].terms:
            if term.server is not None:
                yield Asked(server=term.server, responses=responses, prompt=prompt, response=response)


def own_rewards(stage: Stage) -> tuple[str, ...]:
    """Return the reward that scores all responses of a stage; for a stage without one, the rewards of its judges."""
    own: str | None = getattr(stage, "reward", None)
    return rewards_read(stage) if own is None else (own,)


def summed(asked: Sequence[Asked]) -> tuple[Asked, ...]:
    """Return one entry for each server and length of texts, with the sum of the responses.

    Servers are distinguished by all their fields: two rewards of a stage may give different judges the same name.
    """
    found: dict[tuple[str, float, float], list[Asked]] = {}
    for each in asked:
        found.setdefault((each.server.model_dump_json(), each.prompt, each.response), []).append(each)
    return tuple(
        Asked(
            server=group[0].server,
            responses=sum(each.responses for each in group),
            prompt=group[0].prompt,
            response=group[0].response,
        )
        for group in found.values()
    )
