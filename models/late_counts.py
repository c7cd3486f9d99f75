"""Numbers of a GPU that Python reads a token late, so that it has started the next token before it waits for the last one."""

from collections import deque

import torch
from torch import Tensor

LATE = {"cpu": 0, "cuda": 1}
"""By how many tokens the number of unfinished rows is known late: a GPU that is asked at each token has nothing to do until
Python has started the next one. A response that has ended is computed for so many tokens more, which changes none."""


class LateReads:
    """Tensors on their way to the host, read in their order and some tokens late."""

    def __init__(self, *, late: int) -> None:
        """Begin to count. ``late``: tokens; see `LATE`."""
        self._late = late
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def after(self, tensor: Tensor) -> Tensor | None:
        """Start to read a tensor; the one that was started ``late`` calls before, on the host, or None where there was none."""
        event = torch.cuda.Event() if tensor.device.type == "cuda" else None
        self._coming.append((tensor.to("cpu", non_blocking=True, copy=True), event))
        if event is not None:
            event.record()
        return self.next() if len(self._coming) > self._late else None

    def next(self) -> Tensor | None:
        """Wait for the oldest that has not been read; None: all have been."""
        if not self._coming:
            return None
        read, event = self._coming.popleft()
        if event is not None:
            event.synchronize()
        return read


class Unfinished:
    """How many rows of a batch have not ended."""

    def __init__(self, count: int, *, late: int) -> None:
        """Begin to count. ``late``: tokens; see `LATE`."""
        self._count, self._reads = count, LateReads(late=late)

    def after(self, active: Tensor) -> int:
        """After a token by which ``active`` (b,) rows have not ended: their number, or that of an earlier token."""
        count = self._reads.after(active.sum())
        if count is not None:
            self._count = int(count)
        return self._count
