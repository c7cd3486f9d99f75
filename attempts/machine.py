"""CPUs and GPUs of this machine, and their reservation by stages, which run side by side if there are enough."""

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vantage.schemas.checks.engines import runs_vllm, server_processes_of
from vantage.schemas.recipe.evaluations import BenchmarkEvaluation
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.stage import Resources, Stage, Training
from vantage.schemas.recipe.work import Work
from vantage.schemas.records.attempt import Share
from vantage.schemas.steps import pool_of
from vantage.tasks.training.control_groups import whole_cpus


def num_ranks(work: Work, share: Share | None) -> int:
    """Return the largest number of processes for the work: the recipe's number, or one for each GPU that no server of
    the stage has, at least one on each node.
    """
    if not isinstance(work, Stage):
        return 1
    resources = work.resources
    gpus = len(share.gpus) if share and resources.nodes is None else resources.gpus or 0
    return num_nodes(work) * (resources.distributed.ranks or max(1, gpus - server_processes_of(work)))


def num_nodes(work: Work) -> int:
    """Return the largest number of machines for the work."""
    return work.resources.most_nodes if isinstance(work, Stage) else 1


class Machine:
    """CPUs and GPUs, reserved by stages in the order of their requests.

    The stage at the head of the queue is never overtaken, so small stages cannot starve one that needs the whole
    machine. Belongs to one event loop.
    """

    def __init__(self, *, cpus: int, gpus: tuple[str, ...] = ()) -> None:
        self.cpus = cpus
        self.gpus = gpus
        self._free_cpus = cpus
        self._free_gpus = list(gpus)
        self._queue: deque[tuple[Resources, asyncio.Future[Share]]] = deque()

    def share_of(self, resources: Resources) -> tuple[int, int]:
        """Return (CPUs, GPUs) that a stage gets: None means all CPUs and one GPU; CPUs are limited to those of the machine.

        If a stage sets ranks but no GPUs, it takes one GPU for each rank, or none if there are fewer. Ray places the
        ranks of several nodes, and this machine only waits for them.

        Raises:
            ValueError: the stage needs more GPUs than the machine has.
        """
        if resources.nodes is not None:
            return 1, 0
        ranks = resources.distributed.ranks or 1
        gpus = resources.gpus
        if gpus is None:
            gpus = ranks if ranks <= len(self.gpus) else 0
        if gpus > len(self.gpus):
            raise ValueError(
                f"resources.gpus={gpus} is more than this machine's {len(self.gpus)}; ask for fewer, run on a machine "
                f"that has them, or compute on CPUs with resources.distributed.ranks={gpus} in place of gpus"
            )
        return (self.cpus if resources.cpus is None else min(resources.cpus, self.cpus)), gpus

    @asynccontextmanager
    async def reserve(self, resources: Resources) -> AsyncIterator[Share]:
        """Wait until the stage's share is free, and reserve it for the body of the ``async with``."""
        self.share_of(resources)
        turn: asyncio.Future[Share] = asyncio.get_running_loop().create_future()
        self._queue.append((resources, turn))
        self._grant_waiting()
        try:
            share = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())
            else:
                self._queue = deque(waiting for waiting in self._queue if waiting[1] is not turn)
                self._grant_waiting()
            raise
        try:
            yield share
        finally:
            self._release(share)

    def _release(self, share: Share) -> None:
        self._free_cpus += share.cpus
        self._free_gpus.extend(share.gpus)
        self._grant_waiting()

    def _grant_waiting(self) -> None:
        """Serve the queue from its head while the shares are free."""
        while self._queue:
            resources, turn = self._queue[0]
            cpus, gpus = self.share_of(resources)
            if cpus > self._free_cpus or gpus > len(self._free_gpus):
                return
            self._queue.popleft()
            self._free_cpus -= cpus
            reserved, self._free_gpus = self._free_gpus[:gpus], self._free_gpus[gpus:]
            turn.set_result(Share(cpus=cpus, gpus=tuple(reserved)))


def this_machine() -> Machine:
    """Return the CPUs and GPUs that this process may use."""
    return Machine(cpus=available_cpus(), gpus=available_gpus())


def check_resources(recipe: ResolvedRecipe) -> None:
    """Raise ValueError before any stage starts if one needs more GPUs than there are, or a missing package."""
    check_extras(recipe)
    machine = this_machine()
    for name, stage in recipe.stages.items():
        if pool_of(recipe, name) is not None:
            continue
        try:
            if stage.resources.nodes is not None:
                check_ray(stage.resources.most_nodes)
            machine.share_of(stage.resources)
        except ValueError as error:
            raise ValueError(f"stages.{name}.{error}") from None


def check_extras(recipe: ResolvedRecipe) -> None:
    """Raise ValueError if a package that the recipe needs on this machine is not installed; workers of a pool have
    their own."""
    if recipe.model.quantization is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"model.quantization={recipe.model.quantization} needs the package bitsandbytes; "
            "install it: pip install 'vantage-rlhf[qlora]'"
        )
    for name, stage in recipe.stages.items():
        if pool_of(recipe, name) is not None:
            continue
        is_eight_bit = isinstance(stage, Training) and stage.optimizer_states == "8bit"
        if is_eight_bit and importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(
                f"stages.{name}.optimizer_states=8bit needs the package bitsandbytes; "
                "install it: pip install 'vantage-rlhf[qlora]'"
            )
        if isinstance(stage, BenchmarkEvaluation) and importlib.util.find_spec("lm_eval") is None:
            raise ValueError(
                f"stages.{name}: {stage.kind} needs the package lm_eval; install it: pip install 'vantage-rlhf[lm-eval]'"
            )
        if runs_vllm(stage) and importlib.util.find_spec("vllm") is None:
            raise ValueError(
                f"stages.{name}.rollout.engine=vllm needs the package vllm, which is not installed; install it as docs/rollouts.md "
                "describes, or use engine: loop"
            )


def check_ray(nodes: int) -> None:
    """Raise ValueError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            f"resources.nodes={nodes} needs Ray on this machine and on every node; "
            "install it: pip install 'vantage-rlhf[ray]'"
        )


def available_cpus() -> int:
    """Return the number of CPUs that this process may use: its affinity, or its container's quota if that is less."""
    return whole_cpus(len(os.sched_getaffinity(0)))


def at_most_asked(threads: int) -> int:
    """Return ``threads``, or OMP_NUM_THREADS if that is less."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(threads, int(asked)) if asked.isdecimal() and int(asked) else threads


def available_gpus() -> tuple[str, ...]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or those that the driver lists; CUDA is not used."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return tuple(name for name in names if name and name != "-1")
    return gpus_listed(_listing())


def with_uuids(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs by their UUIDs, so that one GPU has one name; a name that the driver does not list stays as it is.

    Numbers are those of the driver; the number of a GPU with MIG instances stands for its first instance, as in CUDA.
    """
    listing = _listing() if gpus else ""
    numbered = {str(number): (names[1:] or names)[0] for number, names in enumerate(_uuids(listing))}
    listed = gpus_listed(listing)

    def with_uuid(gpu: str) -> str:
        begun = [uuid for uuid in listed if uuid.startswith(gpu)]  # CUDA accepts the beginning of a UUID
        return begun[0] if len(begun) == 1 else numbered.get(gpu, gpu)

    return tuple(dict.fromkeys(with_uuid(gpu) for gpu in gpus))


def gpus_listed(listing: str) -> tuple[str, ...]:
    """Return the UUIDs in the output of ``nvidia-smi -L``; for a GPU with MIG instances, those of the instances."""
    return tuple(name for names in _uuids(listing) for name in (names[1:] or names))


def _listing() -> str:
    """Return the output of ``nvidia-smi -L``; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _uuids(listing: str) -> list[list[str]]:
    """Return, for each GPU of ``nvidia-smi -L``, its UUID and those of its MIG instances."""
    gpus: list[list[str]] = []
    for line in listing.splitlines():
        if match := re.match(r"\s*GPU \d+:.*\(UUID: (GPU-[^)]+)\)", line):
            gpus.append([match[1]])
        elif (match := re.match(r"\s*MIG .*\(UUID: (MIG-[^)]+)\)", line)) and gpus:
            gpus[-1].append(match[1])
    return gpus
