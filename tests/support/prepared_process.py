"""Start modules in processes whose imports are done: one process for each process of the tests loads torch and the stages, and forks.

``run(MODULE, *ARGUMENTS)`` does what ``python -m vantage.attempts.launchers.quick_imports MODULE ARGUMENTS`` does. A process of its
own loads torch and transformers first, which takes four CPU seconds, and each of its ranks loads more when it first needs it.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NoReturn

from vantage.attempts.launchers.quick_imports import quick_imports
from vantage.schemas.kinds import STAGES

ROOT = Path(__file__).parents[2]
LOADED = (
    "tests.tasks.stages_on_ranks",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    *(kind.module for kind in STAGES.values()),
    "vantage.schemas.tables",
)
"""Modules that the process loads before it is asked for anything, with all that they import."""

_prepared: subprocess.Popen[bytes] | None = None


class Started:
    """A process that was forked for one call of a module's ``main``."""

    def __init__(self, prepared: subprocess.Popen[bytes], folder: Path, pid: int) -> None:
        self.pid = pid
        self._prepared, self._folder = prepared, folder
        self._returncode: int | None = None

    def kill(self) -> None:
        """End it with SIGKILL."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and return its code and output as ``subprocess.run`` does.

        Raises:
            TimeoutError: it takes more than ``seconds``.
        """
        if self._returncode is None:
            self._returncode = _reply(self._prepared, seconds)
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess([], self._returncode, out, err)


def run(
    module: str, *arguments: str, environment: dict[str, str] | None = None, seconds: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """Call the module's ``main`` in a process with these arguments, and wait for its end."""
    with started(module, *arguments, environment=environment) as process:
        return process.wait(seconds)


@contextmanager
def started(module: str, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[Started]:
    """Begin such a process, one at a time; after an error nothing of it is left.

    Args:
        environment: variables beside those of this process.
    """
    prepared = _process()
    assert prepared.stdin is not None
    with TemporaryDirectory(prefix="prepared-") as folder:
        asked = {
            "module": module,
            "arguments": arguments,
            "environment": {**os.environ, **(environment or {})},
            "folder": folder,
        }
        for name in ("out", "err"):
            (Path(folder) / name).touch()
        try:
            prepared.stdin.write(json.dumps(asked).encode() + b"\n")
            prepared.stdin.flush()
            process = Started(prepared, Path(folder), _reply(prepared, 60.0))
            yield process
            process.wait(60.0)
        except BaseException:
            end()
            raise


def end() -> None:
    """End the process that forks, with all that it has forked; the next call starts another."""
    global _prepared
    if _prepared is not None:
        with suppress(ProcessLookupError):
            os.killpg(_prepared.pid, signal.SIGKILL)
        _prepared.wait()
        _prepared = None


def _process() -> subprocess.Popen[bytes]:
    global _prepared
    if _prepared is None or _prepared.poll() is not None:
        _prepared = subprocess.Popen(
            [sys.executable, "-m", __name__, *LOADED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            start_new_session=True,  # so that one signal ends it and its ranks
        )
    return _prepared


def _reply(prepared: subprocess.Popen[bytes], seconds: float) -> int:
    """Read the next number that the process writes."""
    assert prepared.stdout is not None
    if not select.select([prepared.stdout], [], [], seconds)[0]:
        raise TimeoutError(f"no reply for {seconds} s")
    return int(prepared.stdout.readline())


# -- in the process that forks


def main() -> None:
    """Load the modules; then, for each line of standard input, fork, and write the pid and later the exit code."""
    with quick_imports():
        for name in sys.argv[1:]:
            importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _work(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _work(asked: dict[str, Any]) -> NoReturn:
    """Be the process that was asked for."""
    folder = Path(asked["folder"])
    code = 1
    try:
        for name, descriptor in (("out", 1), ("err", 2)):
            with (folder / name).open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = [asked["module"], *asked["arguments"]]
        importlib.import_module(asked["module"]).main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _flushed(sys.stdout)
        _flushed(sys.stderr)
        os._exit(code)


def _flushed(stream: IO[str]) -> None:
    with suppress(OSError, ValueError):
        stream.flush()


if __name__ == "__main__":
    main()
