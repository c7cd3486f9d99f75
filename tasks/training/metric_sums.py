"""Sum the metrics of a whole minibatch over its micro-batches and ranks, and divide once."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from vantage.algorithms.metrics import SumCount, metrics_of
from vantage.tasks.training import ranks


class MetricSums:
    """Sums and counts by metric name; a mean of means would give short micro-batches the weight of long ones."""

    def __init__(self) -> None:
        self._sums: dict[str, SumCount] = {}

    def add(self, loss: Any, weight: float = 1.0) -> None:
        """Add every metric of a loss dataclass of ``algorithms``; a weight of 0 adds only the metrics' names."""
        for name, found in metrics_of(loss).items():
            metric = found if weight else SumCount(found.sum * 0, found.count * 0)
            self._sums[name] = self._sums[name] + metric if name in self._sums else metric

    def means(self) -> dict[str, float]:
        """Return the mean over all ranks of each metric with a count above 0."""
        sums = [ranks.total(metric.sum) for metric in self._sums.values()]
        counts = [ranks.total(metric.count) for metric in self._sums.values()]
        numbers = read_together([*sums, *counts])
        pairs = zip(self._sums, numbers[: len(sums)], numbers[len(sums) :], strict=True)
        return {name: total / count for name, total, count in pairs if count}


class LossSums:
    """Losses of a minibatch by name, added up over its micro-batches in float64 on their device, and read once."""

    def __init__(self, *names: str) -> None:
        """Begin the sums; ``names``: names of losses that are 0 if nothing is added."""
        self._sums: dict[str, Tensor | float] = dict.fromkeys(names, 0.0)

    def add(self, name: str, loss: Tensor, weight: float = 1.0) -> None:
        """Add a micro-batch's part of a loss, a 0-d tensor."""
        self._sums[name] = self._sums.get(name, 0.0) + weight * loss.detach().double()

    def totals(self) -> dict[str, float]:
        """Return the sums over all ranks."""
        own = dict(zip(self._sums, read_together(self._sums.values()), strict=True))
        return {name: ranks.total(total) for name, total in own.items()}


def read_together(numbers: Iterable[Tensor | float]) -> list[float]:
    """Return 0-d tensors of one device as Python numbers, waiting only once for a GPU."""
    given = list(numbers)
    tensors = [each.double() for each in given if isinstance(each, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(each, Tensor) else each for each in given]


def means_of(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that report it (equal minibatches, so a mean of means is right)."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: fmean(step[name] for step in steps if name in step) for name in names}
