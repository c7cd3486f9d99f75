"""Handle streams whose reader is gone: a closed pipe, or a terminal whose connection dropped. Neither may end a run."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO


class Attended:
    """A terminal's stream whose terminal may disappear; then a write fails like one to a pipe without a reader."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _as_broken_pipe():
            return self._stream.write(text)

    def flush(self) -> None:
        with _as_broken_pipe():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _as_broken_pipe() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EIO:
            raise BrokenPipeError from error
        raise


def detach_reader(stream: IO[str]) -> None:
    """Redirect a stream without a reader to /dev/null, so that its buffer can be flushed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
