"""Run stages that misbehave in one way each; a child process runs this module by name, and no test imports it."""

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.training import preemption
from vantage.tasks.training.progress import Progress
from vantage.tasks.training.scratch import PROGRESS

if TYPE_CHECKING:
    import torch


def tell(job: StageJob) -> StageResult:
    """Report what the process finds around itself."""
    import torch

    from vantage import models

    print("printed by the stage")
    os.system("echo printed by a program of the stage")
    print("a warning", file=sys.stderr)
    return StageResult(
        metrics={
            "seed": job.seed,
            "threads": torch.get_num_threads(),
            "leads_own_group": float(os.getpgid(0) == os.getpid()),
            "torch_was_loaded": float("transformers" in sys.modules),
        },
        samples=(
            {
                "models": models.__file__,
                "path": sys.path,
                "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "variables": sorted(os.environ),
                "pid": os.getpid(),
                "orchestrator_modules": sorted({"prefect", "mlflow", "vantage.cli.main"} & set(sys.modules)),
            },
        ),
    )


def log_lines(job: StageJob) -> StageResult:
    """Log a line of the stage itself and a line of a library."""
    logging.getLogger("vantage.tasks.sft").info("train: 1016 rows")
    logging.getLogger("somebody.else").info("chatter")
    return StageResult(metrics={})


def save_when_asked(job: StageJob) -> StageResult:
    """Work until asked to stop, then save."""
    (job.scratch / "working").write_text(str(os.getpid()))
    while not preemption.requested():
        time.sleep(0.01)
    (job.scratch / "checkpoint").write_text("step 3")
    raise preemption.Preempted("saved at step 3")


def never_listen(job: StageJob) -> StageResult:
    """Work for ever, deaf to requests, with a program of its own beside it."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (job.scratch / "working").write_text(f"{os.getpid()} {program.pid}")
    while True:
        time.sleep(0.01)


def refuse(job: StageJob) -> StageResult:
    raise ValueError("data.prompts: row 7 has no prompt; remove it")


def break_down(job: StageJob) -> StageResult:
    print("so far so good")
    raise KeyError("no such thing")


def exhaust_memory(job: StageJob) -> StageResult:
    raise MemoryError("cannot allocate 1 TiB")


def fill_disk(job: StageJob) -> StageResult:
    raise OSError(28, "No space left on device", "/x/y")


def save_tensors_beyond_the_limit(job: StageJob) -> StageResult:
    from safetensors.torch import save_file

    return _beyond_the_limit(lambda: save_file({"a": _noise()}, job.scratch / "a.safetensors"))


def save_with_torch_beyond_the_limit(job: StageJob) -> StageResult:
    import torch

    return _beyond_the_limit(lambda: torch.save({"a": _noise()}, job.scratch / "a.pt"))


def write_rows_beyond_the_limit(job: StageJob) -> StageResult:
    import pyarrow
    from pyarrow import parquet

    rows = pyarrow.table({"a": _noise().numpy()})
    return _beyond_the_limit(lambda: parquet.write_table(rows, job.scratch / "a.parquet"))


def fill_a_database_beyond_the_limit(job: StageJob) -> StageResult:
    import sqlite3

    def fill() -> None:
        with sqlite3.connect(job.scratch / "a.db") as database:
            database.execute("CREATE TABLE noise (value BLOB)")
            database.executemany("INSERT INTO noise VALUES (?)", [(os.urandom(1000),)] * 500)

    return _beyond_the_limit(fill)


def save_where_nothing_fits(job: StageJob) -> StageResult:
    """Fail where not even the reason can be written, nor a line of the log."""
    from safetensors.torch import save_file

    return _beyond_the_limit(lambda: save_file({"a": _noise()}, job.scratch / "a.safetensors"), limit=0)


def _noise() -> "torch.Tensor":
    import torch

    return torch.rand(100_000)


def _beyond_the_limit(write: Callable[[], object], *, limit: int = 65536) -> StageResult:
    """Write more than a file may hold from now on, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    write()
    raise AssertionError("it fitted")


def leave_daemons(job: StageJob) -> StageResult:
    """Leave processes behind that are no children of this one: each forks twice in a session of its own."""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                with open(job.scratch / "daemons", "a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(600)
            os._exit(0)
    subprocess.Popen(["setsid", "sleep", "600"])
    while (
        len((job.scratch / "daemons").read_text().split()) < 3 if (job.scratch / "daemons").exists() else True
    ):
        time.sleep(0.01)
    return StageResult(metrics={"done": 1.0})


def leave_daemons_and_be_killed(job: StageJob) -> StageResult:
    leave_daemons(job)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def leave_daemons_and_work(job: StageJob) -> StageResult:
    leave_daemons(job)
    return save_when_asked(job)


def be_killed(job: StageJob) -> StageResult:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def crash(job: StageJob) -> StageResult:
    print("about to crash")
    os.abort()


def end_without_a_result(job: StageJob) -> StageResult:
    """End the process as if all was well."""
    os._exit(0)


def return_nothing(job: StageJob) -> None:
    return None


def leave_a_thread(job: StageJob) -> StageResult:
    """End while a thread of its own still runs."""
    threading.Thread(target=time.sleep, args=(600,)).start()
    return StageResult(metrics={"done": 1.0})


def sleep_for_ever() -> None:
    while True:
        time.sleep(600)


def wait_for_a_thread(job: StageJob) -> StageResult:
    """Wait for a thread that never comes to its end."""
    thread = threading.Thread(target=sleep_for_ever)
    thread.start()
    thread.join()
    raise AssertionError("unreachable")


def report_slowly(job: StageJob) -> StageResult:
    """Take eight seconds, and say so all the while."""
    progress = Progress(job.scratch / PROGRESS, total=8, phase="running")
    for step in range(8):
        time.sleep(1.0)
        progress.update(step + 1)
    return StageResult(metrics={"reports": 8.0})
