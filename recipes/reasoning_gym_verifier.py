"""The verifier of Reasoning Gym's tasks (arXiv 2505.24760): its own scoring, of which the full score is right.

The row's answer is the whole entry as JSON (``reasoning_gym_tasks.py`` writes it), since many tasks have several right
answers, and their scoring reads the entry's ``metadata``.
"""

import json
from functools import cache
from typing import Any

try:
    from reasoning_gym.factory import get_score_answer_fn
except ImportError as error:
    raise ImportError(f"{error}; reasoning-gym is needed: pip install 'vantage-rlhf[recipes]'") from None

RIGHT = 1.0
"""Some tasks score an answer that is nearly right between 0 and 1; as a reward that pays for what is wrong."""

scoring = cache(get_score_answer_fn)
"""Name of a dataset → its function of (answer, entry)."""


def verify(prompt: str, response: str, answer: str | None) -> bool:
    """Whether Reasoning Gym gives the response, without white space around it, the full score.

    Raises:
        ValueError: the row's answer is no entry of Reasoning Gym.
    """
    entry = _entry(answer)
    score = scoring(entry["metadata"]["source_dataset"])
    try:
        return bool(score(answer=response.strip(), entry=entry) >= RIGHT)
    except ValueError:  # some tasks raise where the response is no number
        return False


def _entry(answer: str | None) -> dict[str, Any]:
    try:
        entry = json.loads(answer or "")
        entry["metadata"]["source_dataset"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            "the answer is no entry of Reasoning Gym as JSON; write the file with python -m recipes.reasoning_gym_tasks, "
            "and map it with columns: {prompt: question, answer: entry}"
        ) from None
    return dict(entry)
