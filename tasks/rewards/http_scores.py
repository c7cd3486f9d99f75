"""Score responses by a reward server, a batch of them in one request.

The request is ``{"version": …, "items": [{"prompt": …, "response": …, "answer": …}, …]}``, the answer ``{"scores": [0.5, …]}`` or
``{"scores": [{"helpful": 0.5}, …]}``, in the same order.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vantage.schemas.recipe.served_scores import SCORE, RewardServer
from vantage.schemas.recipe.terms import HttpTerm
from vantage.tasks.rewards.answered_scores import AnsweredScores, Case, Named, named
from vantage.tasks.rewards.asking import Question, Reply
from vantage.tasks.rewards.judge_questions import Unreadable
from vantage.tasks.rewards.term_scores import NamedScores, Source, TermScores

LARGEST = 3.0e38
"""Largest absolute value of a score: float32 has no larger ones."""


def load(term: HttpTerm, source: Source) -> TermScores | NamedScores:
    """Return the server's scores; it is not called yet.

    Raises:
        ValueError: the variable of the server's key is not set.
    """
    server = term.http

    def asked(case: Case) -> list[dict[str, Any]]:
        prompt, response, answer = case
        item = {"prompt": prompt, "response": response, "answer": answer}
        return [{"version": server.version, "names": list(server.names), "item": item}]

    scores = AnsweredScores(
        source,
        server,
        Items(server),
        questions=asked,
        read=lambda text: read_scores(text, server.names),
        joined=lambda read: read[0],
    )
    return named(scores, server)


def read_scores(text: str, names: Sequence[str]) -> Named:
    """Return the scores in a server's answer about one response.

    Raises:
        Unreadable: the answer has other names, or a score is no finite number.
    """
    given = json.loads(text)
    found = given if names and isinstance(given, dict) else {SCORE: given}
    expected = set(names or (SCORE,))
    if found.keys() != expected:
        raise Unreadable(f"it scores {', '.join(sorted(found))}, and names has {', '.join(sorted(expected))}")
    for name, score in found.items():
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        if not is_number or not abs(score) <= LARGEST:  # NaN is neither
            raise Unreadable(f"{name} is {str(score)[:40]}, which is no finite number")
    return {name: float(score) for name, score in found.items()}


class Items:
    """Batches of responses."""

    path = ""

    def __init__(self, server: RewardServer) -> None:
        self.batch = server.batch
        self._version = server.version

    def body(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the request of some responses."""
        return {"version": self._version, "items": [question.asked["item"] for question in questions]}

    def replies(self, body: Any, *, questions: Sequence[Question]) -> list[Reply]:
        """Return the scores of each response as JSON.

        Raises:
            ValueError, KeyError, TypeError, IndexError, AttributeError: the body has not one answer for each response.
        """
        scores = body["scores"]
        if not isinstance(scores, list) or len(scores) != len(questions):
            raise ValueError(
                f"scores of {len(questions)} responses were asked for, and it gives {scores!r}"[:400]
            )
        return [Reply(json.dumps(score, sort_keys=True)) for score in scores]
