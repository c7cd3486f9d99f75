"""The CPUs and GPUs of a worker's machine that one attempt gets.

Attempts on one machine are separate processes, of one worker or of several. Each GPU has a lock file, which the kernel
releases when its process ends. An attempt takes all of its GPUs at once, and attempts wait in turn, so none starves.
"""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vantage.attempts.machine import Machine, available_cpus, available_gpus, with_uuids
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.records.attempt import Share
from vantage.storage.durable_files import open_lock, try_lock

SLOTS = "VANTAGE_WORKER_SLOTS"
"""Variable with the number of attempts that the worker runs at once; they share the machine's CPUs."""

LOCKS = Path("/tmp")
"""Folder for all processes of this machine, whatever value TMPDIR has."""
_SECONDS_BETWEEN_TRIES = 0.5


@contextmanager
def share_of_this_machine(
    resources: Resources, *, stop: threading.Event, gpus: tuple[str, ...] | None = None
) -> Iterator[Share | None]:
    """Wait for the GPUs that ``resources`` asks for, and hold them; None if a stop was requested meanwhile.

    Args:
        resources: what the attempt asks for.
        stop: ends the wait.
        gpus: GPUs of the machine; None: those that this process may use.

        Raises:
            ValueError: ``resources`` asks for more GPUs than there are.
    """
    machine = Machine(cpus=_cpus(), gpus=with_uuids(available_gpus() if gpus is None else gpus))
    cpus, count = machine.share_of(resources)
    with ExitStack() as held:
        taken = _take(count, machine.gpus, stop, held)
        yield None if taken is None else Share(cpus=cpus, gpus=taken)


def _cpus() -> int:
    """Return the number of CPUs of an attempt that does not ask for a number."""
    return max(1, available_cpus() // max(1, int(os.environ.get(SLOTS, "1"))))


def _take(
    count: int, gpus: tuple[str, ...], stop: threading.Event, held: ExitStack
) -> tuple[str, ...] | None:
    if count == 0:
        return ()
    folder = LOCKS / f"vantage-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to another user or is a link; ask whoever made it to remove it")
    turn = open_lock(folder / "turn.lock")
    try:
        while not try_lock(turn):  # the process that has waited longest goes first
            if stop.wait(_SECONDS_BETWEEN_TRIES):
                return None
        while True:
            taken = _try_to_take(count, gpus, folder, held)
            if taken is not None:
                return taken
            if stop.wait(_SECONDS_BETWEEN_TRIES):
                return None
    finally:
        os.close(turn)


def _try_to_take(count: int, gpus: tuple[str, ...], folder: Path, held: ExitStack) -> tuple[str, ...] | None:
    """Take ``count`` GPUs that no other process holds; none if there are fewer."""
    with ExitStack() as locks:
        taken = []
        for gpu in gpus:
            descriptor = open_lock(folder / f"{gpu.replace('/', '-')}.lock")
            locks.callback(os.close, descriptor)
            if try_lock(descriptor):
                taken.append(gpu)
            if len(taken) == count:
                held.push(locks.pop_all())
                return tuple(taken)
    return None
