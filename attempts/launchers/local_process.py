"""The launcher for this machine: a new child process for each attempt, or one that starts several (torchrun).

Children are forks of a server that has torch and transformers loaded (``vantage.attempts.launchers.forkserver``); the orchestrator
never loads them. A child leads its own process group, so that only the orchestrator gets Ctrl-C in a terminal;
the orchestrator passes the request on and waits for a checkpoint. A child dies with the orchestrator.
"""

import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

from vantage.attempts.exit_codes import ExitCode, code_of_signal
from vantage.attempts.identity.child_python import python_environment
from vantage.attempts.identity.inherited import not_inherited
from vantage.attempts.launchers import stage_process
from vantage.attempts.launchers.descendants import end_descendants
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.launchers.rank_processes import forget_ranks, rank_processes
from vantage.attempts.launchers.watchdog import IDLE_SECONDS, Watchdog
from vantage.attempts.machine import available_cpus, num_nodes, num_ranks
from vantage.schemas.recipe.stage import GRACE_SECONDS
from vantage.schemas.records.attempt import RUN_STAGE, Failure, Share
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.safe_text import without_secrets
from vantage.storage.durable_files import make_folder
from vantage.tasks.training.control_groups import oom_kills
from vantage.tasks.training.scratch import PROGRESS

POLL_SECONDS = 0.2
SETTLED_SECONDS = 3.0
"""Seconds without a new line after which the stacks count as written; on a busy machine lines may be seconds apart."""
STACKS_SECONDS = 15.0
"""Most seconds for a hanging stage to write its stacks."""

LONGEST_FOLDER = 70
"""Most bytes of a folder's path: a socket's path has at most 107, and ``/pymp-…/listener-…`` comes after the folder."""

# multiprocessing reads a child's exit status from a pipe that only one thread may read.
_multiprocessing_lock = threading.Lock()

_stages: set[int] = set()
"""Process ids of running stages; guarded by the lock."""


def warm_up() -> None:
    """Start the fork server, unless it runs, and return at once; it loads its libraries in the background."""
    with _multiprocessing_lock:
        if _is_running():  # other threads read the environment, which must not change without need
            return
        with _environment_of_children():
            _make_folder_of_sockets()
            forkserver.set_forkserver_preload(["vantage.attempts.launchers.forkserver"])
            forkserver.ensure_running()


def _is_running() -> bool:
    """Return whether the fork server lives; a zombie does not count."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None:
        return False
    try:
        stat = Path(f"/proc/{server}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


@dataclass(frozen=True)
class LocalProcess:
    """A ``Launcher``: a new child process of this machine for each attempt.

    A stage of several ranks runs in children of that process (``vantage.attempts.launchers.torchrun``), and one of
    several nodes in processes of a Ray cluster, which this child drives (``vantage.attempts.launchers.ray_train``).
    """

    grace: float = GRACE_SECONDS
    """Seconds for a stage to save its state after a stop was requested."""

    def launch(
        self,
        job: StageJob,
        *,
        log: Path,
        share: Share | None = None,
        stop: threading.Event | None = None,
        on_poll: Callable[[], None] | None = None,
        function: str = RUN_STAGE,
        hang_seconds: float | None = None,
    ) -> StageResult:
        """Run one attempt at a stage in a new process and wait for it.

        Args:
            job: the job; ``job.json``, ``result.json`` and ``failure.json`` are in ``attempt_folder(job)``.
            log: file to which all output is appended.
            share: CPUs and GPUs to use; None: all of the machine's. ``job.threads`` has priority for torch; ranks
                share them.
            stop: when set, the process is asked to save and stop, and killed ``grace`` seconds later.
            on_poll: called about five times a second while the process runs, in the calling thread.
            function: dotted name of the function ``StageJob -> StageResult``.
            hang_seconds: seconds without a progress report after which the process writes its stacks to the log and
                is killed; None: never.

        Raises:
            StageFailed: the process ended without a result.
        """
        attempt = attempt_folder(job)
        make_folder(attempt)
        make_folder(log.parent)
        for left_over in ("result.json", "failure.json"):
            (attempt / left_over).unlink(missing_ok=True)
        forget_ranks(attempt)
        stage_process.write_atomically(attempt / "job.json", job.model_dump_json(indent=2))

        threads = job.threads or (share.cpus if share else available_cpus())
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if share else {}
        environment["RAY_ADDRESS"] = os.environ.get(
            "RAY_ADDRESS", "auto"
        )  # the present value, not that at the start of the fork server
        oom_kills_before = oom_kills()
        nodes = num_nodes(job.work)
        process = _start(
            attempt / "job.json", log, function, threads, environment, num_ranks(job.work, share), nodes
        )
        # The process that drives other nodes computes nothing itself.
        idle_seconds = IDLE_SECONDS if nodes == 1 else math.inf
        watchdog = Watchdog(
            job.scratch / PROGRESS,
            hang_seconds=hang_seconds,
            idle_seconds=idle_seconds,
            ranks=lambda: rank_processes(attempt),
        )
        try:
            stopped, hung = _wait(
                process,
                stop=stop,
                on_poll=on_poll,
                grace=self.grace,
                hang_reason=watchdog.hang_reason,
                log=log,
            )
        finally:  # even if `on_poll` fails: no process of the stage outlives it
            _kill_group(process)
            status = _exit_status(process)

        if status == ExitCode.OK and (attempt / "result.json").exists():
            return StageResult.model_validate_json((attempt / "result.json").read_bytes())
        failure = _failure(
            attempt / "failure.json",
            status,
            log=log,
            stopped=stopped,
            hung=hung,
            out_of_memory=oom_kills() > oom_kills_before,
        )
        masked = failure.model_copy(update={"message": without_secrets(failure.message)})
        raise StageFailed(masked, log=log)


def attempt_folder(job: StageJob) -> Path:
    """Return the folder of one attempt's job, result and failure."""
    return _attempt_folder(job.scratch, job.attempt)


def saved_result(scratch: Path, attempt: int) -> StageResult | None:
    """Return the result of an attempt, if its scratch folder still exists."""
    try:
        return StageResult.model_validate_json(
            (_attempt_folder(scratch, attempt) / "result.json").read_bytes()
        )
    except (OSError, ValueError):
        return None


def _attempt_folder(scratch: Path, attempt: int) -> Path:
    return scratch / f"attempt-{attempt}"


def _start(
    job_file: Path,
    log: Path,
    stage: str,
    threads: int,
    environment: dict[str, str],
    num_ranks: int,
    nodes: int,
) -> ForkServerProcess:
    """Fork a child; a dead fork server is replaced.

    Raises:
        StageFailed: the fork server dies each time.
    """
    context = multiprocessing.get_context("forkserver")
    for _ in range(3):
        process = context.Process(
            target=stage_process.main,
            args=(job_file, log, stage, threads, environment, num_ranks, nodes),
            name="stage",
        )
        warm_up()
        try:
            with _multiprocessing_lock, _main_module_hidden():
                process.start()
                _stages.add(_pid(process))
        except (ConnectionError, EOFError):
            time.sleep(POLL_SECONDS)
        else:
            return process
    raise StageFailed(
        Failure(
            exit_code=ExitCode.INTERNAL,
            cause="internal",
            message="the process that stages are forked from ends as soon as it is started",
            remedy="`python -c 'import vantage.attempts.launchers.forkserver'` shows why",
        ),
        log=log,
    )


def _wait(
    process: ForkServerProcess,
    *,
    stop: threading.Event | None,
    on_poll: Callable[[], None] | None,
    grace: float,
    hang_reason: Callable[[int], str | None],
    log: Path,
) -> tuple[bool, str | None]:
    """Wait for the end of the process; returns (whether a stop was requested, why it counts as hung)."""
    kill_at: float | None = None
    next_request = 0.0
    hung: str | None = None
    while not wait([process.sentinel], timeout=POLL_SECONDS):
        if on_poll is not None:
            on_poll()
        if stop is None or not stop.is_set():
            if hung is None and (hung := hang_reason(_pid(process))) is not None:
                _write_stacks(process, log, hung)
            if hung is not None:
                _kill_group(process)
            continue
        now = time.monotonic()
        if kill_at is None:
            kill_at = now + grace
        if now >= kill_at:
            _kill_group(process)
        elif now >= next_request:
            # Repeated every second: a process that has just been forked does not handle signals yet.
            next_request = now + 1.0
            with suppress(ProcessLookupError):
                os.kill(_pid(process), signal.SIGTERM)
    return kill_at is not None, hung


def _write_stacks(process: ForkServerProcess, log: Path, why: str) -> None:
    """Have faulthandler write the stacks of the process's threads; it is in C and takes no lock."""
    with suppress(OSError):  # the disk is full, or the process has just ended: it is killed anyway
        with log.open("a") as file:
            file.write(f"vantage: {why}; stacks of its threads:\n")
        before = size = log.stat().st_size
        os.kill(_pid(process), signal.SIGCONT)  # a stopped process writes no stacks
        os.kill(_pid(process), signal.SIGUSR1)
        grown_at = time.monotonic()
        give_up = grown_at + STACKS_SECONDS
        while time.monotonic() < give_up and not wait([process.sentinel], timeout=POLL_SECONDS):
            if log.stat().st_size != size:
                size, grown_at = log.stat().st_size, time.monotonic()
            elif size > before and time.monotonic() - grown_at > SETTLED_SECONDS:
                break


def _pid(process: ForkServerProcess) -> int:
    assert process.pid is not None, "the process was started"
    return process.pid


def _kill_group(process: ForkServerProcess) -> None:
    """Kill the process group."""
    pid = _pid(process)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        # There is no such group: either all of it has ended, or the process does not lead it yet.
        if not wait([process.sentinel], timeout=0):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _exit_status(process: ForkServerProcess) -> int:
    """Return the exit code as a shell reports it."""
    with _multiprocessing_lock:
        process.join()
        status = process.exitcode
        _stages.discard(_pid(process))
        process.close()
        # Processes of a killed stage are now children of the fork server, whose only other children are stages.
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if server is not None:
            end_descendants(server, keep=_stages)
    assert status is not None, "the process has ended"
    return status if status >= 0 else code_of_signal(-status)


def _failure(
    path: Path, status: int, *, log: Path, stopped: bool, hung: str | None, out_of_memory: bool
) -> Failure:
    """Return the failure that the process reported, or one derived from its exit status."""
    failure = _reported_failure(path)
    if failure is not None:
        if failure.cause != "internal":
            return failure
        return failure.model_copy(
            update={"message": f"{failure.message} [last line of the log: {last_line(log)}]"}
        )
    if status == ExitCode.STORAGE:
        return Failure(
            exit_code=ExitCode.STORAGE,
            cause="storage",
            message="the disk took no more, not even the reason",
            remedy=stage_process.MAKE_ROOM,
        )
    if hung is not None:
        return Failure(
            exit_code=ExitCode.HUNG,
            cause="hung",
            message=f"{hung}: the stage hung and was killed, and the log has the stacks of its threads",
            remedy="mend what they wait for; if the stage was only slow, raise its resources.hang_seconds",
        )
    if stopped:
        return Failure(
            exit_code=ExitCode.RESUME,
            cause="preempted",
            message="the stage was stopped before it could save; it goes on from its last checkpoint",
            remedy="run the same command again",
        )
    was_killed = status in (code_of_signal(signal.SIGKILL), FORKSERVER_LOST)
    if out_of_memory and was_killed:  # otherwise the kernel has killed another process of the group
        return Failure(
            exit_code=ExitCode.OUT_OF_MEMORY,
            cause="memory",
            message="the kernel killed the stage's process because memory ran out",
            remedy="lower the stage's microbatch_tokens, or run fewer stages side by side (resources.cpus)",
        )
    if was_killed:
        return Failure(
            exit_code=ExitCode.RESUME,
            cause="killed",
            message="the stage's process was killed from outside",
            remedy="run the same command again; if it happens again, look for a lack of memory in the kernel's log",
        )
    return Failure(
        exit_code=ExitCode.INTERNAL,
        cause="internal",
        message=f"the stage's process ended with status {status}; last line of the log: {last_line(log)}",
        remedy="the log has the traceback",
    )


def _reported_failure(path: Path) -> Failure | None:
    """Return the failure that the process wrote; None if it wrote none, or an incomplete one."""
    try:
        return Failure.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


FORKSERVER_LOST = 255
"""Exit code that multiprocessing reports for a child whose fork server ended before it."""


def last_line(log: Path, *, begin: int = 0) -> str:
    """Return the last nonblank line of a log after its first ``begin`` bytes, from its last 8 KiB."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return "(the log was never written)"
    return next(
        (line.strip() for line in reversed(lines) if line.strip()),
        "(it wrote nothing)" if begin else "(the log is empty)",
    )


def _make_folder_of_sockets() -> None:
    """Have multiprocessing make its folder of sockets now, in ``/tmp`` if a socket's path below ``TMPDIR`` would be too long."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()  # the folder is cached, and removed at the end of the process
    finally:
        tempfile.tempdir = before


@contextmanager
def _environment_of_children() -> Iterator[None]:
    """Set the fork server's environment: it finds our package, imports nothing from the current folder, and has no
    variables of another launcher's ranks."""
    changes = {
        **dict.fromkeys(not_inherited(os.environ)),
        **python_environment(),
        # Query the driver, not CUDA, for GPUs: a CUDA context does not survive a fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Prevent multiprocessing from running the orchestrator's ``__main__`` again in the child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
