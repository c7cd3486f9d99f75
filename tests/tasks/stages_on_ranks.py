"""Stages on several ranks, as one process of a test starts them:

    python stages_on_ranks.py WORLD_SIZE JOBS

forks WORLD_SIZE gloo processes; each runs every job of the JSON lines in the file JOBS, one after the other.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import torch

from schemas.records.job import StageJob
from tasks.stages import run_stage
from tasks.training import ranks

SECONDS = 60.0
"""The longest wait of a rank for another; one that never comes fails the test."""


def work(rank: int, world_size: int, rendezvous: str, jobs: list[StageJob]) -> None:
    """One rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    ranks.join(timeout_seconds=SECONDS, rendezvous=f"file://{rendezvous}")
    for job in jobs:
        result = run_stage(job)
        (job.scratch / f"result-{rank}.json").write_text(result.model_dump_json())
    ranks.leave()


if __name__ == "__main__":
    world_size, file = int(sys.argv[1]), Path(sys.argv[2])
    found = [StageJob.model_validate_json(line) for line in file.read_text().splitlines()]
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=work, args=(rank, world_size, str(file.with_suffix(".rendezvous")), found))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))
