"""Start the process that holds a model for ``vantage sample`` and ``vantage export``, and exchange messages with it."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel, ValidationError

from vantage.attempts.identity.child_python import python_environment
from vantage.attempts.identity.inherited import not_for_stages
from vantage.attempts.machine import at_most_asked, available_cpus
from vantage.schemas.records.sampling import (
    Merged,
    MergeRequest,
    ModelOpened,
    OpenModel,
    Refused,
    RenderReply,
    RenderRequest,
    SampleReply,
    SampleRequest,
)
from vantage.schemas.safe_text import without_secrets

RENDER_SECONDS = 120.0
"""Most seconds for a request to render rows, without loading the tokenizer; an ordinary template takes milliseconds a
row."""
_SHOWN_LINES = 20

Reply = TypeVar("Reply", bound=BaseModel)


class SamplingFailed(RuntimeError):
    """The process has ended, or met an internal error."""


class SamplingProcess:
    """A model in its own process. The first request loads the weights, so it takes the longest."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: IO[bytes]) -> None:
        self._process = process
        self._log = log

    def send(self, message: BaseModel) -> None:
        """Send a line, whose answer must be read before the next line is sent."""
        assert self._process.stdin is not None, "a pipe"
        with suppress(BrokenPipeError):  # the answer will contain the reason
            self._process.stdin.write(message.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()

    def opened(self) -> ModelOpened:
        """Return the answer to ``OpenModel``, which was sent at the start.

        Raises:
            ValueError: the model cannot be used; the message contains the reason.
            SamplingFailed: the process has ended.
        """
        return self._take(ModelOpened)

    def sampled(self) -> SampleReply:
        """Return the answer to a ``SampleRequest``; raises as ``opened``."""
        return self._take(SampleReply)

    def ask(self, request: SampleRequest) -> SampleReply:
        """Send a request and return its answer."""
        self.send(request)
        return self.sampled()

    def render(self, request: RenderRequest) -> RenderReply:
        """Send rows of data and return them as the model reads them; raises as ``opened``, and ValueError after
        ``RENDER_SECONDS``.

        A chat template is a program, which may run for ever on some rows.
        """
        self.send(request)
        assert self._process.stdout is not None, "a pipe"
        if not select.select([self._process.stdout], [], [], RENDER_SECONDS)[0]:
            raise ValueError(
                f"the model's chat template did not render {len(request.rows):,} rows within {RENDER_SECONDS:g} s; correct "
                "the tokenizer's chat_template, or leave the model out"
            )
        return self._take(RenderReply)

    def merge(self, output: Path) -> None:
        """Write adapters and their base as one model into a new folder; raises as ``opened``."""
        self.send(MergeRequest(output=output))
        self._take(Merged)

    def _take(self, expected: type[Reply]) -> Reply:
        assert self._process.stdout is not None, "a pipe"
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            if status == -signal.SIGPROF:
                raise ValueError(
                    "the model's chat template is not rendered in time; correct the tokenizer's chat_template, or take another model"
                )
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            raise SamplingFailed(f"the process that holds the model has ended ({how})\n{self._last_lines()}")
        try:
            return expected.model_validate_json(line)
        except ValidationError:
            refused = Refused.model_validate_json(line)
        if refused.is_ours:
            raise SamplingFailed(f"{refused.refused}\n{self._last_lines()}")
        raise ValueError(refused.refused)

    def _last_lines(self) -> str:
        """Return the last lines of the process's output."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return without_secrets("\n".join(lines[-_SHOWN_LINES:]))


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vantage-model-process-", ignore_cleanup_errors=True)


@contextmanager
def open_model(opening: OpenModel, *, side_by_side: int = 1) -> Iterator[SamplingProcess]:
    """Start the process and send it the model's name; the process ends with the block.

    Args:
        side_by_side: number of models that are used at the same time. They share the CPUs, since models with all CPUs
            each would slow each other severalfold.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in not_for_stages(os.environ)
    }
    environment |= {
        **python_environment(),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": str(at_most_asked(max(1, available_cpus() // side_by_side))),
    }
    # The process is killed, so it cannot remove its temporary files itself.
    with _temporary_folder() as folder, tempfile.TemporaryFile() as log:
        environment["TMPDIR"] = folder
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vantage.attempts.launchers.quick_imports",
                "vantage.tasks.sampling_process",
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            opened = SamplingProcess(process, log)
            opened.send(opening)
            yield opened
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # closing flushes the unsent bytes
                    pipe.close()  # type: ignore[union-attr]
