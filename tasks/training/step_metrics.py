"""What every step says of itself beside what it learnt: its speed, and what its passes computed."""

import time
from collections import deque

import torch

from models.pass_counts import taken_counts
from tasks.training import ranks

SECONDS_OF_SPEED = 5.0
"""Tokens per second are averaged over the last steps that took so long."""


class Speed:
    """Tokens per second over the last few seconds of wall time."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def after(self, num_tokens: int) -> float:
        """Count a step's tokens; returns the speed up to now."""
        now, total = time.monotonic(), self._marks[-1][1] + num_tokens
        self._marks.append((now, total))
        while len(self._marks) > 2 and now - self._marks[1][0] > SECONDS_OF_SPEED:
            self._marks.popleft()
        start, before = self._marks[0]
        return (total - before) / max(now - start, 1e-9)


def pass_metrics() -> dict[str, float]:
    """Of the passes since the last step, on all ranks; nothing of what no rank did."""
    counts = taken_counts()
    of_ranks = ranks.total(torch.tensor([float(each) for each in vars(counts).values()], dtype=torch.float64))
    of = dict(zip(vars(counts), of_ranks.tolist(), strict=True))
    metrics: dict[str, float] = {}
    if of["passes"]:
        metrics |= {
            "forward_passes": of["passes"],
            "padding_share": 1 - of["tokens"] / of["positions"],
            "logits_again_share": of["logits_rows_again"] / max(of["logits_rows"], 1.0),
        }
    if of["prompt_tokens"]:
        metrics |= {
            "prompt_reads": of["prompt_positions"] / of["prompt_tokens"],
            "ended_rows_share": of["ended_rows"] / max(of["sampled_rows"], 1.0),
        }
    return metrics
