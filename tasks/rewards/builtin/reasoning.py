"""``builtin:reasoning_gym``: does Reasoning Gym's own scoring (arXiv 2505.24760) accept the response?

The row's answer is the whole entry as JSON, since many tasks have several right answers, and their scoring reads the entry's
``metadata``. White space around the response does not count. Where the scoring raises ValueError, the response is wrong.
"""

import json
from functools import cache
from typing import Any

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier, ReasoningGymVerifier
from vantage.tasks.rewards.builtin.judge import Judge, UnusableAnswer


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the scoring."""
    from reasoning_gym.factory import get_score_answer_fn

    assert isinstance(verifier, ReasoningGymVerifier)
    scoring = cache(get_score_answer_fn)

    def judge(response: str, answer: str | None) -> bool:
        entry = _entry(answer)
        try:
            score = scoring(entry["metadata"]["source_dataset"])
        except ValueError as error:
            raise UnusableAnswer(
                f"Reasoning Gym does not know the answer's metadata.source_dataset: {error}; write the entry again"
            ) from None
        try:
            return bool(score(answer=response.strip(), entry=entry) >= verifier.at_least)
        except ValueError:  # some tasks raise where the response is no number
            return False

    return judge


def _entry(answer: str | None) -> dict[str, Any]:
    try:
        entry = json.loads(answer or "")
        entry["metadata"]["source_dataset"]
    except (ValueError, TypeError, KeyError):
        raise UnusableAnswer(
            f"the answer {(answer or '')[:100]!r} is no entry of Reasoning Gym as JSON; map the entry with columns.answer"
        ) from None
    return dict(entry)
