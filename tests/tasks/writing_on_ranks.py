"""Run stages on two gloo ranks whose checkpoints are written beside training, as one process of a test starts them:

    WITH_TORCH.run_main("tests.tasks.writing_on_ranks", JOBS, STRATEGY, HARM)

runs every job of the JSON lines in the file JOBS, one after the other; a job named ``plain`` writes its checkpoints
between two steps. HARM (``none``, ``kill`` or ``full``) is what happens to the second rank of the last job in the
thread that writes its second checkpoint, or to the first rank under ddp, which alone writes.
"""

import errno
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage
from vantage.tasks.training import checkpoint_writing, checkpoints, ranks

SECONDS = 60.0
"""The longest wait of a rank for another; one that never comes fails the test."""


def work(rank: int, rendezvous: str, jobs: list[StageJob], strategy: str, harm: str) -> None:
    """Work as one rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    ranks.join(hang_seconds=SECONDS, sharded=strategy == "fsdp2", rendezvous=f"file://{rendezvous}")
    commit: Callable[..., checkpoints.Checkpoint] = vars(checkpoints)["commit"]
    save_file: Callable[..., None] = vars(checkpoints)["save_file"]
    for job in jobs:
        share = 0.0 if job.name == "plain" else 0.5
        vars(checkpoint_writing)["SHARE_OF_MEMORY"] = share
        harmed = harm if job is jobs[-1] and rank == (1 if strategy == "fsdp2" else 0) else "none"
        written: list[Any] = []
        writes = iter(range(1000))

        def remember(*args: Any, **options: Any) -> checkpoints.Checkpoint:
            made = commit(*args, **options)
            files = json.loads((made.folder / "manifest.json").read_bytes())["files"]
            state = re.sub(r'"journal_offset":\d+', "", (made.folder / "state.json").read_text())
            written.append([[each["sha256"] for each in files if "tensors" in each["path"]], state])  # noqa: B023
            return made

        def write(tensors: Any, file: Path) -> None:
            is_beside = threading.current_thread() is not threading.main_thread()
            if is_beside and next(writes) == 1 and harmed != "none":  # noqa: B023
                if harmed == "full":  # noqa: B023
                    raise OSError(errno.ENOSPC, "No space left on device")
                os.kill(os.getpid(), signal.SIGKILL)
            save_file(tensors, file)

        vars(checkpoints).update(commit=remember, save_file=write)
        run_stage(job)
        if rank == 0:
            (job.scratch / "written.json").write_text(json.dumps(written))
    ranks.leave()


def main() -> None:
    """Begin both ranks; when one has failed, end the other, and end as the worst of both."""
    file = Path(sys.argv[1])
    jobs = [StageJob.model_validate_json(line) for line in file.read_text().splitlines()]
    context = multiprocessing.get_context("fork")
    arguments = (str(file.with_suffix(".rendezvous")), jobs, *sys.argv[2:])
    processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    multiprocessing.connection.wait([each.sentinel for each in processes])
    for process in processes:
        process.join(SECONDS if all(each.exitcode in (None, 0) for each in processes) else 5.0)
    codes = [abs(each.exitcode or 0) for each in processes]
    for process in processes:
        process.kill()
    sys.exit(max(codes))
