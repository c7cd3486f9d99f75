"""Count, for each step, the answers of judges and reward servers, and their cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vantage.schemas.metric_names import UNREADABLE_SHARE
from vantage.tasks.training import ranks


@dataclass
class _Step:
    """Counts since the last call of ``answer_metrics``."""

    is_used: bool = False
    asked: int = 0
    failed_calls: int = 0
    answers: int = 0
    unreadable: int = 0
    tokens: int = 0
    cost: float = 0.0
    weighed: int = 0
    """Answers that are probabilities."""
    probability: float = 0.0
    """Sum of the probability of all labels, over these answers."""


_now = _Step()


def note_asked(count: int, *, failed_calls: int) -> None:
    """Count questions that were sent to a server, and requests that failed; other questions are answered from the
    file."""
    _now.asked += count
    _now.failed_calls += failed_calls


def note_answer(tokens: Sequence[int], *, cost: float, probability: float | None = None) -> None:
    """Count an answer that a step's scores are read from, new or stored.

    Args:
        probability: probability that a model of the run gives any of the allowed answers; None: a server answers in
            text.
    """
    _now.is_used = True
    _now.answers += 1
    _now.tokens += sum(tokens)
    _now.cost += cost
    if probability is not None:
        _now.weighed += 1
        _now.probability += probability


def note_unreadable() -> None:
    """Count an answer from which no scores can be read."""
    _now.unreadable += 1


def answer_metrics() -> dict[str, float]:
    """Return the metrics since the last call, over all ranks; empty if no server was asked. All ranks call this."""
    global _now
    step, _now = _now, _Step()
    counts = [
        step.is_used,
        step.asked,
        step.failed_calls,
        step.answers,
        step.unreadable,
        step.tokens,
        step.cost,
        step.weighed,
        step.probability,
    ]
    total = ranks.total(torch.tensor([float(each) for each in counts], dtype=torch.float64)).tolist()
    if not total[0]:
        return {}
    names = ("asked", "failed_calls", "answers", "unreadable", "tokens", "cost")
    found = {f"judge_{name}": value for name, value in zip(names, total[1:7], strict=True)}
    found[UNREADABLE_SHARE] = found["judge_unreadable"] / found["judge_answers"]
    weighed, probability = total[7:]
    return {**found, "judge_probability": probability / weighed} if weighed else found
