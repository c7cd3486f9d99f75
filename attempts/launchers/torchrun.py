"""Run a stage in several processes (ranks) of this machine, by torchrun's elastic agent inside the stage's process.

The agent computes nothing. It forks the ranks from the stage's process, which has loaded torch and used no GPU, gives
each its place (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` …) and ends all when one fails. Each attempt has its
own rendezvous, on loopback, and no restart: the orchestrator makes the next attempt, from the checkpoint.

This module loads torch, so only stage processes import it.
"""

import faulthandler
import logging
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from vantage.attempts.exit_codes import ExitCode, code_of_signal
from vantage.attempts.launchers import stage_process
from vantage.attempts.launchers.descendants import adopt_descendants
from vantage.attempts.launchers.rank_processes import LOGS, announce_rank
from vantage.schemas.recipe.stage import Resources, Stage
from vantage.schemas.records.attempt import Failure
from vantage.schemas.records.job import StageJob
from vantage.tasks.training import preemption, ranks
from vantage.tasks.training.writer import writes_files

LOOPBACK = "127.0.0.1"
SECONDS_TO_END = 5
"""Seconds for the other ranks to end after one has failed; then they are killed."""
SECONDS_FOR_STACKS = 10.0
"""Most seconds for the ranks to write their stacks."""
SECONDS_WITHOUT_A_LINE = 1.0
"""Seconds without a new line after which all ranks count as done with writing."""
SECONDS_FOR_THE_CAUSE = 10.0
"""Seconds for which a rank whose communication broke waits to be ended, since the rank that broke it reports the
cause."""


def run_ranks(job_file: Path, stage: str, num_ranks: int) -> int:
    """Run the stage on ``num_ranks`` processes; returns the exit code for all of them.

    SIGTERM (save and stop) and SIGUSR1 (write stacks) to this process are passed on to every rank.
    """
    logs = _logs(job_file)
    logs.mkdir(exist_ok=True)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, lambda number, _frame: _pass_on(number))
    signal.signal(signal.SIGUSR1, lambda _number, _frame: _print_stacks(job_file, num_ranks))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"{job_file.parents[1].name}-{job_file.parent.name}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        start_method="fork",
        signals_to_handle="SIGINT",
        shutdown_timeout=SECONDS_TO_END,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
    )
    threads = max(1, int(os.environ["OMP_NUM_THREADS"]) // num_ranks)
    try:
        elastic_launch(config, _rank)(str(job_file), stage, threads)
    except ChildFailedError as error:
        return _exit_code(job_file, error)
    return ExitCode.OK


def _pass_on(number: int) -> None:
    for process in multiprocessing.active_children():
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, number)


def _print_stacks(job_file: Path, num_ranks: int) -> None:
    """Print the stacks of all ranks, one rank after the other. Each writes to its own file, since lines would mix in a
    common one."""
    files = [_stacks_file(job_file, rank) for rank in range(num_ranks)]
    before = sizes = _sizes(files)
    _pass_on(signal.SIGCONT)  # a stopped process writes no stacks
    _pass_on(signal.SIGUSR1)
    grown_at = time.monotonic()
    give_up = grown_at + SECONDS_FOR_STACKS
    while (now := time.monotonic()) < give_up:
        if (found := _sizes(files)) != sizes:
            sizes, grown_at = found, now
        has_each = all(size > old for size, old in zip(sizes, before, strict=True))
        if has_each and now - grown_at > SECONDS_WITHOUT_A_LINE:
            break
        time.sleep(0.05)
    for rank, (file, old) in enumerate(zip(files, before, strict=True)):
        text = file.read_bytes()[old:].decode() if file.exists() else ""
        print(f"rank {rank}:\n{text or 'has written nothing'}", flush=True)


def _sizes(files: list[Path]) -> list[int]:
    return [file.stat().st_size if file.exists() else 0 for file in files]


def _logs(job_file: Path) -> Path:
    return job_file.parent / LOGS


def _stacks_file(job_file: Path, rank: int) -> Path:
    return _logs(job_file) / f"stacks-{rank}"


def _exit_code(job_file: Path, error: ChildFailedError) -> int:
    """Return the exit code of the failure that a rank has reported; else that of the rank that ended first."""
    with suppress(OSError, ValueError):
        return Failure.model_validate_json(job_file.with_name("failure.json").read_bytes()).exit_code
    _, first = error.get_first_failure()
    return first.exitcode if first.exitcode >= 0 else code_of_signal(-first.exitcode)


def _rank(job_file: str, stage: str, threads: int) -> None:
    """Run one rank: return when the stage is done, and end the process when it failed."""
    adopt_descendants()
    stage_process.die_with(os.getppid())
    preemption.listen()
    path = Path(job_file)
    announce_rank(path.parent, int(os.environ["RANK"]))
    # it stays open until the process ends, since the signal's handler writes into it
    stacks = _stacks_file(path, int(os.environ["RANK"])).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if not writes_files():
        logging.getLogger("vantage.tasks").setLevel(logging.WARNING)  # all ranks log the same messages
    try:
        resources = _resources(path)
        ranks.join(
            hang_seconds=resources.hang_seconds,
            sharded=resources.distributed.strategy == "fsdp2",
        )
        stage_process.compute(path, stage)
        ranks.leave()
    except BaseException as error:  # as in ``stage_process.main``
        if ranks.is_of_communication(error):
            _wait_to_be_ended()
        stage_process.end(stage_process.report(error, path))


def _resources(job_file: Path) -> Resources:
    work = StageJob.model_validate_json(job_file.read_bytes()).work
    return work.resources if isinstance(work, Stage) else Resources()


def _wait_to_be_ended() -> None:
    """Wait until the agent ends this rank because another one has ended; an error of this rank must not hide the other's."""
    deadline = time.monotonic() + SECONDS_FOR_THE_CAUSE
    while time.monotonic() < deadline:
        if preemption.requested():
            stage_process.end(ExitCode.RESUME)
        time.sleep(0.05)
