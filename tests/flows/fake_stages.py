"""Stages that misbehave in one way each; run by name in a child process, never imported by a test."""

import os
import signal
import subprocess
import sys
import threading
import time

from schemas.job import StageJob, StageResult
from tasks.training import preemption
from tasks.training.progress import Progress
from tasks.training.scratch import PROGRESS


def tell(job: StageJob) -> StageResult:
    """Report what the process finds around itself."""
    import torch

    import models

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
                "pid": os.getpid(),
                "orchestrator_modules": sorted({"prefect", "mlflow", "flows.cli"} & set(sys.modules)),
            },
        ),
    )


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


def be_killed(job: StageJob) -> StageResult:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def crash(job: StageJob) -> StageResult:
    print("about to crash")
    os.abort()


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
