"""Run stages on several ranks, as one process of a test starts them:

    WITH_TORCH.run_main("tests.tasks.stages_on_ranks", WORLD_SIZE, JOBS, STRATEGY, EPS, MEMORY)

forks WORLD_SIZE gloo processes. Each runs every job of the JSON lines in the file JOBS, one after the other, with EPS
as AdamW's epsilon. MEMORY is JSON: for each job the bytes that each rank has, or [] where they are not counted.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.support.on_ranks import fork_ranks
from tests.tasks.live_memory import LiveMemory
from vantage.models import sharding
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.stages import run_stage
from vantage.tasks.training import memory_meter, optimization, ranks

SECONDS = 60.0
"""The longest wait of a rank for another; one that never comes fails the test."""


def work(
    rank: int,
    world_size: int,
    rendezvous: str,
    jobs: list[StageJob],
    strategy: str,
    eps: float,
    memory: list[list[int]],
) -> None:
    """Work as one rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    vars(optimization)["EPS"] = eps
    ranks.join(hang_seconds=SECONDS, sharded=strategy == "fsdp2", rendezvous=f"file://{rendezvous}")
    for number, job in enumerate(jobs):
        read = count_bytes()
        result = run_within(job, memory[number][rank], rank) if memory else run_stage(job)
        (job.scratch / f"bytes-{rank}.json").write_text(json.dumps(read))
        (job.scratch / f"result-{rank}.json").write_text(result.model_dump_json())
    ranks.leave()


def run_within(job: StageJob, limit: int, rank: int) -> StageResult:
    """Run a job in so many bytes, and write down how many it took at once."""
    with LiveMemory(limit) as live:
        vars(memory_meter)["meter"] = lambda: live
        result = run_stage(job)
    (job.scratch / f"peak-{rank}.json").write_text(json.dumps(live.peak()))
    return result


def count_bytes() -> list[int]:
    """Return a list to which the bytes of every weight are added that is read part by part from now on."""
    found: list[int] = []

    class Counted:
        def __init__(self, file: Any, name: str) -> None:
            self._slice = file.get_slice(name)

        def __getitem__(self, rows: slice) -> torch.Tensor:
            read: torch.Tensor = self._slice[rows]
            found.append(read.numel() * read.element_size())
            return read

    class Opened(contextlib.AbstractContextManager[Any]):
        def __init__(self, file: Path, framework: str) -> None:
            self._opened: Any = safe_open(file, framework=framework)

        def __exit__(self, *error: object) -> None:
            self._opened.__exit__(*error)

        def get_slice(self, name: str) -> Counted:
            return Counted(self._opened, name)

    vars(sharding)["safe_open"] = Opened
    return found


def main() -> None:
    """Begin the ranks, and end as the worst of them."""
    world_size, file = int(sys.argv[1]), Path(sys.argv[2])
    found = [StageJob.model_validate_json(line) for line in file.read_text().splitlines()]
    strategy, eps, memory = sys.argv[3], float(sys.argv[4]), json.loads(sys.argv[5])
    fork_ranks(world_size, work, str(file.with_suffix(".rendezvous")), found, strategy, eps, memory)
