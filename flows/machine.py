"""What this machine has, and who may use how much of it: stages run side by side while it suffices."""

import asyncio
import math
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from schemas.recipe.recipe import ResolvedRecipe
from schemas.recipe.stages import Resources
from schemas.records.attempt import Share

CGROUP = Path("/sys/fs/cgroup")


class Machine:
    """CPUs and GPUs, lent to stages in the order in which they ask.

    A stage at the head of the queue is never overtaken, so one that needs the whole machine is not starved by
    small ones. Belongs to one event loop.
    """

    def __init__(self, *, cpus: int, gpus: tuple[str, ...] = ()) -> None:
        self.cpus = cpus
        self.gpus = gpus
        self._free_cpus = cpus
        self._free_gpus = list(gpus)
        self._queue: deque[tuple[Resources, asyncio.Future[Share]]] = deque()

    def share_of(self, resources: Resources) -> tuple[int, int]:
        """(CPUs, GPUs) that a stage takes: None is all CPUs and one GPU; more CPUs than there are is all.

        Raises:
            ValueError: more GPUs are asked for than the machine has.
        """
        gpus = min(1, len(self.gpus)) if resources.gpus is None else resources.gpus
        if gpus > len(self.gpus):
            raise ValueError(
                f"resources.gpus={gpus} is more than this machine's {len(self.gpus)}; "
                "ask for fewer, or run on a machine that has them"
            )
        return (self.cpus if resources.cpus is None else min(resources.cpus, self.cpus)), gpus

    @asynccontextmanager
    async def lend(self, resources: Resources) -> AsyncIterator[Share]:
        """Wait until the stage's share is free, and hold it for the body of the ``async with``."""
        self.share_of(resources)
        turn: asyncio.Future[Share] = asyncio.get_running_loop().create_future()
        self._queue.append((resources, turn))
        self._serve()
        try:
            share = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._take_back(turn.result())
            else:
                self._queue = deque(waiting for waiting in self._queue if waiting[1] is not turn)
                self._serve()
            raise
        try:
            yield share
        finally:
            self._take_back(share)

    def _take_back(self, share: Share) -> None:
        self._free_cpus += share.cpus
        self._free_gpus.extend(share.gpus)
        self._serve()

    def _serve(self) -> None:
        """Lend to the head of the queue for as long as its share is free."""
        while self._queue:
            resources, turn = self._queue[0]
            cpus, gpus = self.share_of(resources)
            if cpus > self._free_cpus or gpus > len(self._free_gpus):
                return
            self._queue.popleft()
            self._free_cpus -= cpus
            lent, self._free_gpus = self._free_gpus[:gpus], self._free_gpus[gpus:]
            turn.set_result(Share(cpus=cpus, gpus=tuple(lent)))


def this_machine() -> Machine:
    """The machine that this process runs on, as far as it may use it."""
    return Machine(cpus=available_cpus(), gpus=available_gpus())


def refuse_what_does_not_fit(recipe: ResolvedRecipe) -> None:
    """ValueError for a stage that asks for more GPUs than there are, before any other begins."""
    machine = this_machine()
    for name, stage in recipe.stages.items():
        try:
            machine.share_of(stage.resources)
        except ValueError as error:
            raise ValueError(f"stages.{name}.{error}") from None


def available_cpus(cgroup: Path = CGROUP) -> int:
    """CPUs that this process may use: its affinity, or its container's quota where that is less."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, math.floor(int(quota) / int(period))))


def available_gpus() -> tuple[str, ...]:
    """GPUs that CUDA_VISIBLE_DEVICES names, or else those that the driver lists; asked without CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return tuple(name for name in names if name and name != "-1")
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return gpus_listed(listing.stdout)


def gpus_listed(listing: str) -> tuple[str, ...]:
    """UUIDs from ``nvidia-smi -L``; for a GPU that is cut up, those of its MIG instances instead."""
    gpus: list[list[str]] = []
    for line in listing.splitlines():
        if match := re.match(r"\s*GPU \d+:.*\(UUID: (GPU-[^)]+)\)", line):
            gpus.append([match[1]])
        elif (match := re.match(r"\s*MIG .*\(UUID: (MIG-[^)]+)\)", line)) and gpus:
            gpus[-1].append(match[1])
    return tuple(name for names in gpus for name in (names[1:] or names))


def oom_kills(cgroup: Path = CGROUP) -> int:
    """How many processes of this container the kernel has killed for want of memory; 0 where it does not tell."""
    try:
        counts = dict(line.split() for line in (cgroup / "memory.events").read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
