"""Run the process that holds a model for ``vantage sample`` and ``export`` as a thread of the test: its imports take seconds."""

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.attempts.launchers import sampling_process


class ModelThread:
    """Answers the lines of its standard input as the process would; it has what ``sampling_process`` uses of ``Popen``."""

    def __init__(self, command: Sequence[str], **_: Any) -> None:
        """Start to answer."""
        assert command[-1] == "vantage.tasks.sampling_process"
        (requests, to_model), (from_model, replies) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(to_model, "wb"), os.fdopen(from_model, "rb")
        self._thread = threading.Thread(target=_answer, args=(requests, replies), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Close its input; the thread then ends."""
        with suppress(OSError):
            self.stdin.close()

    def wait(self) -> int:
        """Wait for its end."""
        self._thread.join()
        return 0


def _answer(requests: int, replies: int) -> None:
    from vantage.tasks.sampling_process import answer_lines  # loads torch

    with open(requests, "rb") as lines, open(replies, "w", encoding="utf-8") as out:
        answer_lines(lines, out)


@contextmanager
def models_in_threads() -> Iterator[None]:
    """Have the commands of this process open models in threads."""
    with pytest.MonkeyPatch.context() as patched:
        fake = SimpleNamespace(Popen=ModelThread, PIPE=subprocess.PIPE)
        patched.setattr(sampling_process, "subprocess", fake)
        yield
