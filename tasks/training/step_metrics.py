"""Measure every step of any stage: its speed, its memory, and the work of its passes."""

import resource
import sys
import time
from collections import deque

import torch

from vantage.models.compiled_layers import taken_graphs
from vantage.models.pass_counts import taken_counts
from vantage.schemas.metric_names import GRAPHS
from vantage.tasks.training import compile_outcome, ranks
from vantage.tasks.training.answer_record import answer_metrics
from vantage.tasks.training.engine_record import engine_metrics

SECONDS_OF_SPEED = 5.0
"""Seconds of the last steps over which tokens per second are averaged."""

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in the unit in which the system reports the peak memory of a process."""


class Speed:
    """Tokens per second over the last few seconds of wall time."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def after(self, num_tokens: int) -> float:
        """Count a step's tokens; returns the present speed."""
        now, total = time.monotonic(), self._marks[-1][1] + num_tokens
        self._marks.append((now, total))
        while len(self._marks) > 2 and now - self._marks[1][0] > SECONDS_OF_SPEED:
            self._marks.popleft()
        start, before = self._marks[0]
        return (total - before) / max(now - start, 1e-9)


def peak_memory() -> float:
    """Return the peak memory in bytes on the rank with the most: of tensors on its GPU since the last call; without a
    GPU, of the whole process since it began, which never falls."""
    if torch.cuda.is_available():
        own = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    of_ranks = torch.zeros(ranks.world_size(), dtype=torch.float64)
    of_ranks[ranks.rank()] = own
    return float(ranks.total(of_ranks).max())


def pass_metrics() -> dict[str, float]:
    """Return metrics of the passes since the last step over all ranks, without those of passes that no rank made."""
    counts, graphs = taken_counts(), taken_graphs()
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
    metrics |= engine_metrics()
    metrics |= answer_metrics()
    if compile_outcome.is_any_compiled():
        metrics["graphs_compiled"] = float(graphs)
    if of["graph_replays"] or of["graph_fallbacks"]:
        metrics |= {name: of[name] for name in GRAPHS}
    return metrics
