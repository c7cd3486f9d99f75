"""Metrics as sums and counts, so that micro-batches and ranks add up.

By convention, every field of a loss except `.loss` is a `SumCount` with the name of the metric that its mean is
logged as. Add those of all micro-batches, all-reduce `sum` and `count` over ranks, then divide once. A mean of
micro-batch means would weigh a short micro-batch like a long one.
"""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from vantage.algorithms.masking import keep


@dataclass(frozen=True)
class SumCount:
    """A mean before its division: `sum` and `count` are detached 0-d tensors."""

    sum: Tensor
    count: Tensor

    def __add__(self, other: "SumCount") -> "SumCount":
        return SumCount(self.sum + other.sum, self.count + other.count)

    def mean(self) -> float:
        """Return sum / count, or NaN if nothing was counted."""
        count = self.count.item()
        return self.sum.item() / count if count else float("nan")


def sum_count(values: Tensor, mask: Tensor) -> SumCount:
    """Return the sum of `values` over the True elements of `mask`, and their number; same shapes, any number of
    axes."""
    return SumCount(keep(values.detach(), mask).sum(), mask.sum())


def metrics_of(loss: Any) -> dict[str, SumCount]:
    """Return the metrics of a loss dataclass by name, without `.loss`."""
    return {field.name: getattr(loss, field.name) for field in fields(loss) if field.name != "loss"}
