"""Divide work into chunks."""


def chunks(count: int, size: int | None) -> list[slice]:
    """Return slices of at most ``size`` that cover ``count`` in order; None: one slice."""
    step = size or max(count, 1)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
