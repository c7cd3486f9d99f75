"""Show each warning of our own loggers once, whatever Prefect sets for all loggers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]

_ours = logging.getLogger("vantage")
_shown: list["_Shown"] = []
"""Handlers of the open blocks; only the newest one shows warnings."""


@contextmanager
def warnings_shown(say: Say) -> Iterator[None]:
    """Pass the text of each warning of our loggers inside this block, from any thread, to ``say`` and to nothing else.

    The root logger's handler belongs to Prefect, which prints either all of our messages or none. A repeated text is passed
    only once: some are repeated for as long as a server does not answer.
    """
    shown = _Shown(say)
    _shown.append(shown)
    _give_to_the_last()
    try:
        yield
    finally:
        _shown.remove(shown)
        _give_to_the_last()


def _give_to_the_last() -> None:
    for handler in [each for each in _ours.handlers if isinstance(each, _Shown)]:
        _ours.removeHandler(handler)
    if _shown:
        _ours.addHandler(_shown[-1])
    _ours.propagate = not _shown


class _Shown(logging.Handler):
    """A handler that passes on each text once."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if text not in self._said:
                self._said.add(text)
                self._say(text)
        except Exception:  # a message that cannot be shown must not end the work
            self.handleError(record)
