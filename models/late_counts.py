"""Read numbers of a GPU one token late, so that Python starts the next token before it waits for the last one."""

from collections import deque

import torch
from torch import Tensor

LATE = {"cpu": 0, "cuda": 1}
"""Number of tokens after which the number of unfinished rows is known. A GPU whose result is awaited at each token is
idle until Python has started the next one. A response that has ended is computed for that many more tokens, which
does not change it."""


class LateReads:
    """Tensors that are copied to the host, and read in order some tokens later."""

    def __init__(self, *, late: int) -> None:
        """Prepare the reads. ``late``: number of tokens; see `LATE`."""
        self._late = late
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def after(self, tensor: Tensor) -> Tensor | None:
        """Start to read a tensor; returns the tensor of ``late`` calls before, on the host, or None if there was
        none."""
        event = torch.cuda.Event() if tensor.device.type == "cuda" else None
        self._coming.append((tensor.to("cpu", non_blocking=True, copy=True), event))
        if event is not None:
            event.record()
        return self.next() if len(self._coming) > self._late else None

    def next(self) -> Tensor | None:
        """Return the oldest tensor that has not been read, waiting for it; None: all have been read."""
        if not self._coming:
            return None
        read, event = self._coming.popleft()
        if event is not None:
            event.synchronize()
        return read


class Unfinished:
    """Number of rows of a batch that have not ended."""

    def __init__(self, count: int, *, late: int) -> None:
        """Begin to count. ``late``: number of tokens; see `LATE`."""
        self._count, self._reads = count, LateReads(late=late)

    def after(self, active: Tensor) -> int:
        """Return the number of rows that were unfinished ``late`` tokens ago. ``active`` (b,): rows that are unfinished
        now."""
        count = self._reads.after(active.sum())
        if count is not None:
            self._count = int(count)
        return self._count
