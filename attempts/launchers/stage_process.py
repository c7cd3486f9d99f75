"""The main function of a stage's process.

All its output is in files: ``result.json`` or ``failure.json`` next to ``job.json``, and the log. Its exit code is one
of ``vantage.attempts.exit_codes``.
"""

import ctypes
import faulthandler
import importlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import (
    NoReturn,
    TextIO,
    cast,
)

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.identity.inherited import forget_foreign_variables, not_for_stages
from vantage.attempts.identity.package import package_folder
from vantage.attempts.launchers.descendants import adopt_descendants, end_descendants
from vantage.attempts.launchers.disk_faults import is_bucket_fault, is_disk_fault
from vantage.attempts.launchers.safe_stream import SafeStream
from vantage.schemas.records.attempt import Cause, Failure
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.safe_text import without_secrets
from vantage.storage.durable_files import expected
from vantage.storage.refs import DamagedObject
from vantage.tasks.training import preemption
from vantage.tasks.training.writer import writes_files

OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Messages of torch's RuntimeErrors about memory."""

MAKE_ROOM = "make room (or the disk writable) and run the same command again"
_MESSAGE_CHARACTERS = 300

PR_SET_PDEATHSIG = 1
"""Value of the constant in ``linux/prctl.h``."""


def main(
    job_file: Path,
    log: Path,
    stage: str,
    threads: int,
    environment: Mapping[str, str],
    num_ranks: int = 1,
    nodes: int = 1,
) -> NoReturn:
    """Run the stage of ``job_file`` and end the process.

    ``stage`` is the dotted name of a function ``StageJob -> StageResult``; ``threads``: of torch; ``environment`` is
    added to the process's own. With more than one rank, children of the process compute; with more than one node,
    processes of a Ray cluster. The process leads its own group, dies with its parent, and treats SIGTERM as a request to
    save and stop.
    """
    os.setsid()
    adopt_descendants()
    _die_with_parent()
    preemption.listen()
    _redirect_output(log)
    _log_stage_messages()
    _remove_current_folder_from_path()
    # those of the fork server, which another program than our command may have started
    forget_foreign_variables()
    for name in not_for_stages(os.environ):
        del os.environ[name]
    os.environ.update(environment)
    _limit_threads(threads)
    try:
        if num_ranks == 1:
            compute(job_file, stage)
            end(ExitCode.OK)
        if nodes > 1:
            from vantage.attempts.launchers import ray_train  # this loads torch and Ray

            end(ray_train.run_ranks(job_file, stage, nodes=nodes, num_ranks=num_ranks))
        from vantage.attempts.launchers import torchrun  # this loads torch

        end(torchrun.run_ranks(job_file, stage, num_ranks))
    except BaseException as error:  # the process ends here, with a code for every reason
        end(report(error, job_file))


def compute(job_file: Path, stage: str) -> None:
    """Run the stage in this process; the first of a stage's processes writes the result beside the job."""
    job = StageJob.model_validate_json(job_file.read_bytes())
    with expected(job.scratch):  # a workspace that is moved away meanwhile is not created again
        result = import_function(stage)(job)
    if not isinstance(result, StageResult):
        raise TypeError(f"{stage} returned {type(result).__name__}, not StageResult")
    if writes_files():
        write_atomically(job_file.with_name("result.json"), result.model_dump_json(indent=2))


def report(error: BaseException, job_file: Path) -> int:
    """Write the failure for an error beside the job, and its traceback to the log; returns its exit code."""
    failure = explain(error)
    with suppress(OSError):  # on a full disk, the exit code is enough
        write_atomically(job_file.with_name("failure.json"), failure.model_dump_json(indent=2))
        traceback.print_exception(error)
    return failure.exit_code


def end(code: int) -> NoReturn:
    """End this process at once: threads and workers of a stage must not delay its end, or outlive it."""
    with suppress(OSError):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    end_descendants(os.getpid())
    os._exit(code)


_DIVERGED: tuple[ExitCode, Cause, str] = (
    ExitCode.BAD_INPUT,
    "diverged",
    "lower the stage's learning_rate, or look at the batch that the message names",
)
BY_NAME: Mapping[str, tuple[ExitCode, Cause, str]] = {
    "TrainingDiverged": _DIVERGED,
    "FloatingPointError": _DIVERGED,
    "EngineUnavailable": (
        ExitCode.RESUME,
        "engine",
        "look at the servers of rollout.url, and run the same command again to go on from the last checkpoint",
    ),
    "VllmFailed": (
        ExitCode.RESUME,
        "engine",
        "run the same command again to go on from the last checkpoint, with a lower rollout.max_rows, or use rollout.engine: loop",
    ),
    "VllmCannotStart": (
        ExitCode.BAD_INPUT,
        "refused",
        "correct what vLLM names, leave it more memory, or use rollout.engine: loop",
    ),
    "JudgeUnavailable": (
        ExitCode.RESUME,
        "engine",
        "look at the server, and run the same command again: it goes on from the last checkpoint, and asks nothing twice",
    ),
    "BudgetSpent": (
        ExitCode.GATE_CLOSED,
        "guard",
        "raise the budget (it is in no stage key) and run the same command again, which asks nothing twice",
    ),
    "GuardFired": (
        ExitCode.GATE_CLOSED,
        "guard",
        "look at the curve; change the recipe, or that guard in it",
    ),
}
"""Name of an error → exit code, cause and remedy. Errors are recognised by name, since this module must load without
torch."""


def explain(error: BaseException) -> Failure:
    """Return the failure for an error of a stage; pure."""
    message = without_secrets(str(error).strip() or type(error).__name__)
    if isinstance(error, preemption.TimeIsUp):
        return Failure(
            exit_code=ExitCode.RESUME,
            cause="time",
            message=message,
            remedy="run the same command again to go on from there, or raise the limit (it is in no stage key)",
        )
    if isinstance(error, preemption.Preempted):
        return Failure(
            exit_code=ExitCode.RESUME, cause="preempted", message=message, remedy="run the same command again"
        )
    kind = type(error).__name__
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or _is_out_of_memory(error):
        return Failure(
            exit_code=ExitCode.OUT_OF_MEMORY,
            cause="memory",
            message=_first_sentences(message),
            remedy="lower the stage's microbatch_tokens; the result stays the same",
        )
    if is_disk_fault(error):
        return Failure(
            exit_code=ExitCode.STORAGE,
            cause="storage",
            message=message,
            remedy=MAKE_ROOM,
        )
    if is_bucket_fault(error):
        return Failure(
            exit_code=ExitCode.STORAGE,
            cause="storage",
            message=_first_sentences(message),
            remedy="look at the bucket's address, its login and the network, and run the same command again",
        )
    if isinstance(error, DamagedObject):
        return Failure(
            exit_code=ExitCode.STORAGE,
            cause="storage",
            message=message,
            remedy="run the same command again, which makes it anew",
        )
    if kind in BY_NAME:
        exit_code, cause, remedy = BY_NAME[kind]
        return Failure(exit_code=exit_code, cause=cause, message=message, remedy=remedy)
    if isinstance(
        error, ValueError | FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
    ):
        return Failure(
            exit_code=ExitCode.BAD_INPUT,
            cause="refused",
            message=message,
            remedy="correct what the message names and run again",
        )
    return Failure(
        exit_code=ExitCode.INTERNAL,
        cause="internal",
        message=f"{kind}: {message}",
        remedy="the log has the traceback",
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether a RuntimeError comes from one of torch's allocators."""
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in OUT_OF_MEMORY_MESSAGES)


def _first_sentences(message: str) -> str:
    """Return the first sentences in one line, without torch's source location at the start and its advice at the end."""
    line = re.sub(r"^\[enforce fail at [^\]]+\] .*?\. ", "", " ".join(message.split()))
    return " ".join(re.split(r"(?<=[.!?])\s+(?=[A-Z])", line)[:3])[:_MESSAGE_CHARACTERS]


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the complete file or none."""
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the fork server ends; that ends with the orchestrator.

    The signal comes when the *thread* that forked us ends; the fork server forks in its only thread.
    """
    # The fork server ends when the other end of this pipe is closed everywhere, and every child inherits it.
    alive_fd = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    os.close(alive_fd)
    die_with(os.getppid())
    # The orchestrator may have died before the line above took effect.
    orchestrator = multiprocessing.parent_process()
    if orchestrator is not None and not orchestrator.is_alive():
        os._exit(ExitCode.RESUME)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread that forked it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before the line above took effect
        os._exit(ExitCode.RESUME)


def _redirect_output(log: Path) -> None:
    """Redirect standard output and error, also of C libraries, to the log, and standard input to /dev/null."""
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout, sys.stderr = (_masked_stream(descriptor) for descriptor in (1, 2))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1 writes the stacks


def _log_stage_messages() -> None:
    """Log the stages' own messages, one line each, with the time; loggers of libraries are unchanged."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    ours = logging.getLogger("vantage.tasks")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def _masked_stream(descriptor: int) -> TextIO:
    stream = open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    return cast(TextIO, SafeStream(stream, without_secrets))


def _remove_current_folder_from_path() -> None:
    """Remove the current folder from the import path: a user's ``datasets.py`` there must not hide a library.

    multiprocessing passes its parent's path to every child, and ``python -m`` puts the folder first.
    """
    here = Path.cwd()
    if here != package_folder().parent:
        sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != here]


def _limit_threads(count: int) -> None:
    """Limit torch to ``count`` threads, whether it is loaded already or later."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)


def import_function(stage: str) -> Callable[[StageJob], object]:
    """Return the function of that dotted name."""
    if stage.startswith("tasks."):  # a queued request of a version whose modules had no prefix
        stage = f"vantage.{stage}"
    module, _, name = stage.rpartition(".")
    function: Callable[[StageJob], object] = getattr(importlib.import_module(module), name)
    return function
