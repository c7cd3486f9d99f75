"""Metrics of a whole minibatch, added up over its micro-batches and ranks and divided once."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from algorithms.metrics import SumCount, metrics_of
from tasks.training import ranks


class MetricSums:
    """Sums and counts by metric name; a mean of micro-batch means would weigh short ones like long ones."""

    def __init__(self) -> None:
        self._sums: dict[str, SumCount] = {}

    def add(self, loss: Any, weight: float = 1.0) -> None:
        """Add every metric of a loss dataclass of ``algorithms``; a weight of 0 adds its name alone."""
        for name, found in metrics_of(loss).items():
            metric = found if weight else SumCount(found.sum * 0, found.count * 0)
            self._sums[name] = self._sums[name] + metric if name in self._sums else metric

    def means(self) -> dict[str, float]:
        """The mean, over all ranks, of each metric of which anything was counted."""
        sums = {
            name: SumCount(ranks.total(metric.sum), ranks.total(metric.count))
            for name, metric in self._sums.items()
        }
        return {name: metric.mean() for name, metric in sums.items() if metric.count.item()}


def means_of(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the steps that report it (equal minibatches, so a mean of means is right)."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: fmean(step[name] for step in steps if name in step) for name in names}
