"""Run a stage in processes (ranks) of several machines (nodes) with Ray Train, driven from the stage's process.

Ray places the ranks, connects them and ends all when one fails. It restarts none: the orchestrator makes the next
attempt, from the checkpoint, on the nodes that Ray then has (``ray_nodes`` waits for them). The stage's process and all
ranks use the
attempt's folders (job, result, checkpoints), so these lie on a file system that all nodes share.

This module loads torch and Ray, so only stage processes import it.
"""

import faulthandler
import logging
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import (
    RayTrainError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from vantage.attempts.exit_codes import ExitCode, code_of_signal
from vantage.attempts.identity.package import package_digest, package_version
from vantage.attempts.launchers import stage_process
from vantage.attempts.launchers.quick_imports import quick_imports
from vantage.attempts.launchers.ray_nodes import wait_for_nodes
from vantage.attempts.launchers.waiting import NodesAsked, Waiting
from vantage.attempts.segments import begin_segment
from vantage.schemas.checks.engines import server_processes_of
from vantage.schemas.recipe.stage import Resources, Stage
from vantage.schemas.recipe.stages import threads_for_each
from vantage.schemas.records.attempt import Failure
from vantage.schemas.records.job import StageJob
from vantage.tasks.training import preemption, ranks
from vantage.tasks.training.writer import writes_files

LIBRARIES = ("torch", "transformers", "ray")
"""Libraries whose versions must be equal on all nodes."""

STOP = "stop"
"""File in the attempt's folder that asks the ranks to save and stop."""
BEGUN = "begun"
"""File in the attempt's folder that a rank writes when it begins."""
STACKS = "stacks"
"""File in the attempt's folder that asks the ranks to write their stacks, into ``stacks-RANK`` beside it."""
_START_FAILURES = (WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError)
_MOST_FAILED_STARTS = 3
"""How often ranks may fail to start on existing nodes. For nodes that do not exist yet, the stage waits."""
_SECONDS_TO_BEGIN = 900.0
"""Seconds within which ranks must begin. Ray waits without limit if a node is lost before its first process."""
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_STACKS = 3.0
_SECONDS_TO_CONNECT = 20.0
_SECONDS_TO_LEAVE = 15.0
_MOST_OF_AN_ERROR = 400
"""Characters of an error of Ray in a failure; the log has all of it."""


def run_ranks(job_file: Path, stage: str, *, nodes: int, num_ranks: int) -> int:
    """Run the stage on ``num_ranks`` processes, equally many on each of ``nodes``; returns the exit code for all.

    If the recipe allows fewer nodes and no more exist, fewer ranks compute. SIGTERM (save and stop) and SIGUSR1 (write
    stacks) to
    this process are passed on to every rank.

    Raises:
        ValueError: there is no Ray cluster, or a node differs from this machine in something that the stage needs.
    """
    _connect(nodes)
    folder = job_file.parent
    for left_over in (folder / STOP, folder / BEGUN, *folder.glob(f"{STACKS}*")):
        left_over.unlink(missing_ok=True)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, lambda *_: _ask(folder / STOP))
    signal.signal(signal.SIGUSR1, lambda *_: _print_stacks(folder, num_ranks))
    job = StageJob.model_validate_json(job_file.read_bytes())
    work = _work(job_file)
    asked = _nodes_asked(work.resources, on_each=num_ranks // nodes, servers=server_processes_of(work))
    failed_starts = 0
    try:
        while True:
            waiting = Waiting(job.scratch, asked)
            found = wait_for_nodes(asked, waiting, is_stopped=(folder / STOP).exists)
            ranks_found = found * (num_ranks // nodes)
            begin_segment(job.scratch, attempt=job.attempt, ranks=ranks_found)
            waiting.is_over(found, ranks_found)
            try:
                trainer = _trainer(job_file, stage, nodes=found, num_ranks=ranks_found)
                with _ended_unless_begun(job_file):
                    trainer.fit()
                return ExitCode.OK
            except ControllerError as error:
                # No rank has begun: a node was lost since it was found, or its processes do not start.
                failed_starts += isinstance(error.controller_failure, WorkerGroupStartupFailedError)
                is_of_start = isinstance(error.controller_failure, _START_FAILURES)
                if not is_of_start or failed_starts >= _MOST_FAILED_STARTS:
                    return _exit_code(job_file, error)
                print(f"the ranks did not start, and are started again: {error}", flush=True)
            except TrainingFailedError as error:
                return _exit_code(job_file, error)
    finally:
        _leave()


@contextmanager
def _ended_unless_begun(job_file: Path) -> Iterator[None]:
    """End this process as a killed one, which the orchestrator tries again, if no rank has begun in time."""
    is_over = threading.Event()

    def watch() -> None:
        if not is_over.wait(_SECONDS_TO_BEGIN) and not job_file.with_name(BEGUN).exists():
            os._exit(_report_as_killed(job_file, f"no rank has begun after {_SECONDS_TO_BEGIN:.0f} s"))

    threading.Thread(target=watch, name="vantage-start", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _nodes_asked(resources: Resources, *, on_each: int, servers: int = 0) -> NodesAsked:
    """Return the nodes to ask Ray for; ``on_each``: ranks on a node; ``servers``: servers that the stage starts for
    each node."""
    processes = on_each + servers
    cpus = processes * _cpus_of_each(resources, processes)
    return NodesAsked(resources.least_nodes, resources.most_nodes, cpus, processes if resources.gpus else 0)


def _cpus_of_each(resources: Resources, processes: int) -> int:
    """Return the CPUs of each rank and server; ``processes``: number of both on a node."""
    return max(1, (resources.cpus or 0) // processes)


def _trainer(job_file: Path, stage: str, *, nodes: int, num_ranks: int) -> TorchTrainer:
    """Return Ray's trainer, which neither restarts failed ranks nor goes on trying to start them."""
    folder, work = job_file.parent, _work(job_file)
    resources = work.resources
    return TorchTrainer(
        _rank,
        train_loop_config={
            "job_file": str(job_file),
            "stage": stage,
            "threads": _threads(work, nodes=nodes, num_ranks=num_ranks),
            "nodes": nodes,
            "versions": _versions(),
        },
        torch_config=TorchConfig(timeout_s=int(ranks.patience(resources.hang_seconds).total_seconds())),
        scaling_config=_placement(
            resources, nodes=nodes, num_ranks=num_ranks, servers=server_processes_of(work)
        ),
        run_config=RunConfig(  # type: ignore[arg-type]  # annotated with the class of Ray Train V1
            name=f"{folder.parent.name}-{folder.name}",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=0
            ),
        ),
    )


def _connect(nodes: int) -> None:
    """Become a driver of the cluster that RAY_ADDRESS names; ``auto``: of the cluster of this machine.

    All processes that the cluster starts for the stage get its address. Without it, Ray Train's cleaner asks the
    cluster that was started last on its machine whether the stage lives, and removes the ranks if that is another
    cluster.
    """
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}
    address = os.environ["RAY_ADDRESS"]
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal() and "/" not in host:  # Ray tries for minutes, and then ends the process
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()
        if address == "auto":
            ray.init(address=address)
            address = ray.get_runtime_context().gcs_address
            ray.shutdown()
        ray.init(address=address, runtime_env={"env_vars": {"RAY_ADDRESS": address}})
    except (OSError, RuntimeError, RayError) as error:
        raise ValueError(
            f"resources.nodes={nodes}: this machine reaches no Ray cluster (RAY_ADDRESS={address}): {error}; start "
            "`ray start --head` on one machine and `ray start --address=HEAD:6379` on the others, this one among them"
        ) from error


def _leave() -> None:
    """Disconnect from the cluster. Ray may wait for ever if a node was lost; then this process ends anyway."""
    leaving = threading.Thread(target=ray.shutdown, name="leave", daemon=True)
    leaving.start()
    leaving.join(_SECONDS_TO_LEAVE)
    if leaving.is_alive():
        print("Ray does not let go of the cluster; this process ends without it", flush=True)


def _placement(resources: Resources, *, nodes: int, num_ranks: int, servers: int = 0) -> ScalingConfig:
    """Return the placement of the ranks. Several on a node are packed: if whole nodes of GPUs are asked for, whole
    nodes are taken."""
    on_each = num_ranks // nodes
    return ScalingConfig(
        num_workers=num_ranks,
        use_gpu=bool(resources.gpus),
        resources_per_worker={"CPU": _cpus_of_each(resources, on_each + servers)},
        placement_strategy="STRICT_SPREAD" if on_each == 1 else "PACK",
    )


def _ask(file: Path) -> None:
    with suppress(OSError):
        file.touch()


def _print_stacks(folder: Path, num_ranks: int) -> None:
    """Have the ranks write their stack traces, and print them to the log, since this process is about to be killed."""
    for earlier in folder.glob(f"{STACKS}*"):
        earlier.unlink(missing_ok=True)
    _ask(folder / STACKS)
    deadline = time.monotonic() + _SECONDS_FOR_STACKS
    while len(found := sorted(folder.glob(f"{STACKS}-*[0-9]"))) < num_ranks and time.monotonic() < deadline:
        time.sleep(0.1)
    for file in found:
        print(f"rank {file.name.removeprefix(STACKS + '-')}:\n{file.read_text()}", flush=True)


def _exit_code(job_file: Path, error: TrainingFailedError) -> int:
    """Return the exit code of the failure that a rank has reported, or that of a killed process if a rank or its node
    was lost.

    Raises:
        Exception: the error of a rank that could not report it.
    """
    with suppress(OSError, ValueError):
        return Failure.model_validate_json(job_file.with_name("failure.json").read_bytes()).exit_code
    if isinstance(error, WorkerGroupError):
        found = list(error.worker_failures.values())
        for each in found:
            if isinstance(each, ValueError | MemoryError):
                raise each
        for each in found:
            if isinstance(each, RayError | RayTrainError):
                print(error, flush=True)
                return _report_as_killed(job_file, f"a rank was lost: {_in_one_line(each)}")
    raise error


def _report_as_killed(job_file: Path, message: str) -> int:
    """Write the failure of an attempt that ended as if it was killed, so that another may go on from it; returns the
    exit code."""
    print(f"{message}: the attempt ends", flush=True)
    failure = Failure(
        exit_code=ExitCode.RESUME,
        cause="killed",
        message=message,
        remedy="run the same command again; if it happens again, look at this node in Ray's dashboard and logs",
    )
    with suppress(OSError):
        stage_process.write_atomically(job_file.with_name("failure.json"), failure.model_dump_json(indent=2))
    return code_of_signal(signal.SIGKILL)


def _in_one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if len(words) <= _MOST_OF_AN_ERROR else f"{words[:_MOST_OF_AN_ERROR]} …"


def _rank(config: dict[str, Any]) -> None:
    """Run one rank, in a worker of Ray Train, which has begun the process group."""
    path = Path(config["job_file"])
    _check_node(path, config["versions"])
    _ask(path.with_name(BEGUN))
    torch.set_num_threads(config["threads"])
    with quick_imports():  # Ray's worker has loaded torch, and the stage loads transformers
        stage_process.import_function(config["stage"])
    if not writes_files():
        logging.getLogger("vantage.tasks").setLevel(logging.WARNING)  # all ranks log the same messages
    with _listening(path.parent):
        work = _work(path)
        _place_servers(work, nodes=config["nodes"])
        resources = work.resources
        if int(os.environ["WORLD_SIZE"]) > 1:  # for one rank Ray starts no process group, and none is needed
            sharded = resources.distributed.strategy == "fsdp2"
            ranks.join(hang_seconds=resources.hang_seconds, sharded=sharded)
        try:
            stage_process.compute(path, config["stage"])
        except BaseException as error:
            if not ranks.is_of_communication(error):  # otherwise another rank reports the cause
                stage_process.report(error, path)
            raise


def _place_servers(work: Stage, *, nodes: int) -> None:
    """Have Ray place the servers that the stage starts: as many on each of ``nodes`` as the recipe asks for."""
    if servers := server_processes_of(work):
        from vantage.tasks.rollout import own_servers  # most stages do not need this module

        on_each = int(os.environ["WORLD_SIZE"]) // nodes
        cpus = _cpus_of_each(work.resources, on_each + servers)
        own_servers.place_by_ray(cpus=cpus, nodes=nodes)


def _check_node(job_file: Path, versions: dict[str, str]) -> None:
    """Raise ValueError if this node would not do the job as the asking machine would."""
    if not job_file.is_file():
        raise ValueError(
            f"resources.nodes: node {platform.node()} does not see {job_file.parent}; put the workspace (with a bucket: "
            "the folder VANTAGE_CACHE) on a file system that all nodes share"
        )
    found = _versions()
    if found != versions:
        raise ValueError(
            f"resources.nodes: node {platform.node()} has {found}, and the machine that asks for it {versions}; "
            "install the same versions on all nodes"
        )


def _versions() -> dict[str, str]:
    ours = f"{package_version()} ({package_digest()[:12]})"  # two checkouts may have one version
    return {
        "python": platform.python_version(),
        "vantage": ours,
        **{name: version(name) for name in LIBRARIES},
    }


@contextmanager
def _listening(folder: Path) -> Iterator[None]:
    """React to the files STOP and STACKS: the stage is in a thread of Ray's worker, which gets no signals."""
    done = threading.Event()

    def listen() -> None:
        stacks = folder / f"{STACKS}-{ranks.rank()}"
        while not done.wait(_SECONDS_BETWEEN_LOOKS):
            if not preemption.requested() and (folder / STOP).exists():
                preemption.request()
            if (folder / STACKS).exists() and not stacks.exists():
                with stacks.with_suffix(".partial").open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                stacks.with_suffix(".partial").replace(stacks)

    thread = threading.Thread(target=listen, name="vantage-listen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _work(job_file: Path) -> Stage:
    work = StageJob.model_validate_json(job_file.read_bytes()).work
    assert isinstance(work, Stage), "an implicit step has one process"
    return work


def _threads(work: Stage, *, nodes: int, num_ranks: int) -> int:
    """Return the CPU threads of torch on each rank."""
    return threads_for_each(
        work, (work.resources.cpus or 0) * nodes // (num_ranks + nodes * server_processes_of(work))
    )
