"""Record which networks of a stage were compiled, without loading a tensor library."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_noted: ContextVar[list[bool] | None] = ContextVar("compiled networks", default=None)


@contextmanager
def noting() -> Iterator[list[bool]]:
    """Record inside the block, for each network that should be compiled, whether it was."""
    noted: list[bool] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note(*, is_compiled: bool) -> None:
    """Record one more network."""
    if (noted := _noted.get()) is not None:
        noted.append(is_compiled)


def is_any_compiled() -> bool:
    """Return whether any network of this stage was compiled."""
    return any(_noted.get() or ())


def metrics_of(noted: list[bool]) -> dict[str, float]:
    """Return the share of the networks that were not compiled; empty if none should be."""
    return {"uncompiled_share": noted.count(False) / len(noted)} if noted else {}
