"""``builtin:reasoning_gym``: does Reasoning Gym's own scoring (arXiv 2505.24760) accept the response, or which score does it give?

The row's answer is the whole entry as JSON, since many tasks have several right answers, and their scoring reads the entry's
``metadata``. White space around the response does not count. The scoring of some tasks raises an error for a response of another
form than they expect: such a response is wrong, with the score 0. An entry whose own answer cannot be scored, or is
not right, is refused; some tasks' entries have no answer of their own, and are not tried.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier, ReasoningGymVerifier
from vantage.tasks.rewards.builtin.judge import Judge, UnusableAnswer


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the scoring."""
    from reasoning_gym.factory import get_score_answer_fn

    assert isinstance(verifier, ReasoningGymVerifier)

    @lru_cache(maxsize=4096)
    def scoring(answer: str | None) -> Callable[[str], float]:
        entry = _entry(answer)
        try:
            score = get_score_answer_fn(entry["metadata"]["source_dataset"])
            own = entry.get("answer")
            found = score(answer=own, entry=entry)
        except Exception as error:
            raise UnusableAnswer(
                f"Reasoning Gym cannot score the entry's own answer ({type(error).__name__}: {error}); write the entry again"
            ) from error
        if own is not None and found < verifier.at_least:
            raise UnusableAnswer(
                f"Reasoning Gym scores the entry's own answer {found:g}, which is below at_least={verifier.at_least:g}; entries of some "
                "tasks do not survive being written as JSON; leave this task out, or lower at_least"
            )
        return lambda response: float(score(answer=response, entry=entry))

    def graded(response: str, answer: str | None) -> float:
        score = scoring(answer)
        try:
            return score(response.strip())
        except Exception:  # the entry itself can be scored, so the response is at fault
            return 0.0

    def judge(response: str, answer: str | None) -> bool:
        return graded(response, answer) >= verifier.at_least

    return graded if verifier.graded else judge


def _entry(answer: str | None) -> dict[str, Any]:
    try:
        entry = json.loads(answer or "")
        entry["metadata"]["source_dataset"]
    except (ValueError, TypeError, KeyError):
        raise UnusableAnswer(
            f"the answer {(answer or '')[:100]!r} is no entry of Reasoning Gym as JSON; map the entry with columns.answer"
        ) from None
    return dict(entry)
