"""Compute stages that train nothing but write what real ones write: checkpoints, journal, progress, deterministic files.

A stage's "weights" are a hash chain over its configuration, its inputs' weights and its steps, so that a lost or
doubled step, or a wrong input, shows in the artifact's digest. Each computation that starts or finishes adds a line to
``events.txt`` in the workspace. Other files there, where they exist, change what stages do:

* ``seconds.txt``: how long a step takes.
* ``lose.txt``: the stage whose first process is lost.
* ``refuse.txt``: the stage that refuses its input.
* ``leak.txt``: the stage that prints and raises secrets.
* ``idle.txt``: the stage that ends with the weights that it started from.
* ``memory.txt``: for how many rows at once a stage has room in ``FATAL_STEP`` (``sft 32``).
* ``rows.txt``: how many rows a pass has at most (``sft 12``).
* ``silent.txt``: a stage that does not report how many rows it computes at once (``sft 1``).
* ``hang.txt``: in how many attempts a stage hangs in ``FATAL_STEP`` (``sft 1``).
* ``found.txt``: for how many positions a stage finds room.
* ``measured.json``: more metrics of kinds of stages, and under ``dropped`` why rows were left out.
* ``diagnosis.json``: the diagnosis that a critic's stage writes.
"""

import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import cast

from vantage.ledger.journal import Journal
from vantage.schemas.recipe.pass_limits import FoundLimits
from vantage.schemas.recipe.stages_on_data import SupervisedFineTuning
from vantage.schemas.recipe.work import ImportVerifier
from vantage.schemas.records.job import StageJob, StageResult
from vantage.storage.durable_files import replace_file
from vantage.tasks.training import preemption
from vantage.tasks.training.progress import Progress, computing
from vantage.tasks.training.scratch import CHECKPOINTS, JOURNAL, PROGRESS, write_committed, write_found

STEPS = 12
CHECKPOINT_EVERY = 4
FATAL_STEP = 5
WEIGHTS = "weights.txt"

METRICS = {
    "import_model": {},
    "prepare_data": {"train_rows": 10.0},
    "mix_data": {"train_rows": 10.0},
    "import_verifier": {},
    "sft": {"validation_nll": 0.5},
    "reward_model": {"pair_accuracy": 0.8},
    "value_pretraining": {"explained_variance": 0.4},
    "policy_optimization": {"score": 1.5},
    "evaluation": {"accuracy_gain": 0.1},
}


def run_stage(job: StageJob) -> StageResult:
    """Make one attempt at any kind of work."""
    pace = workspace_of(job) / "seconds.txt"
    seconds = float(pace.read_text()) if pace.exists() else 0.0
    mark(job, "started")
    if _is_named(job, "lose.txt") and job.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_named(job, "refuse.txt"):
        refuse(job)
    if _is_named(job, "leak.txt"):
        leak()
    if job.work.kind == "import_verifier":
        from vantage.tasks import import_verifier  # loads torch, which takes each process of a stage seconds

        # quick enough to be done as it is, but for the prompts, of which there are none here
        import_verifier.run(cast(StageJob[ImportVerifier], job.model_copy(update={"inputs": {}})))
        weights = digest("".join(path.read_text() for path in sorted(job.output.iterdir())))
    elif job.work.kind in ("import_model", "prepare_data", "mix_data"):
        weights = digest(job.name)
    else:
        weights = train(job, seconds)
        if _is_named(job, "idle.txt"):
            weights = (job.inputs["init"] / WEIGHTS).read_text()
    (job.output / WEIGHTS).write_text(weights)
    diagnosis = workspace_of(job) / "diagnosis.json"
    if job.work.kind == "value_pretraining" and diagnosis.exists():
        (job.output / "diagnosis.json").write_bytes(diagnosis.read_bytes())
    samples = (
        ({"prompt": "1+1?", "baseline": "3", "candidate": "2"},) if job.work.kind == "evaluation" else ()
    )
    mark(job, "finished")
    told = workspace_of(job) / "measured.json"
    measured = json.loads(told.read_text()) if told.exists() else {}
    if "dropped" in measured and job.work.kind == "prepare_data":
        (job.output / "report.json").write_text(json.dumps({"dropped": measured["dropped"]}))
    metrics = {**METRICS[job.work.kind], **measured.get(job.work.kind, {})}
    return StageResult(metrics=metrics, tokenizer_digest=digest("tokenizer"), samples=samples)


def leak() -> None:
    """Print and raise whatever a careless library could, with codes that clear a terminal."""
    print(dict(os.environ))
    raise OSError(
        f"\x1b[2J\u202ecannot reach http://someone:{os.environ['CANARY_TOKEN']}@host/x?token=canary-in-a-query {os.environ['HF_TOKEN']}"
    )


def train(job: StageJob, seconds: float) -> str:
    """Return the hash chain over configuration, inputs and steps, continued from the newest checkpoint."""
    checkpoint = job.scratch / CHECKPOINTS / "checkpoint.json"
    checkpoint.parent.mkdir(exist_ok=True)
    journal = Journal(job.scratch / JOURNAL)
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_bytes())
        journal.truncate(saved["offset"])
    else:
        inputs = {role: (folder / WEIGHTS).read_text() for role, folder in job.inputs.items()}
        saved = {"step": 0, "weights": digest(job.stage_key + json.dumps(inputs, sort_keys=True))}
        journal.truncate(0)
    progress = Progress(job.scratch / PROGRESS, total=STEPS, phase="training")
    if (found := _number_for(job, "found.txt")) is not None:
        write_found(job.scratch, FoundLimits(tokens=found), device="of the tests")
    weights: str = saved["weights"]
    for step in range(saved["step"], STEPS):
        time.sleep(seconds)
        if step == FATAL_STEP:
            exhaust_memory(job)
            hang(job)
        weights = digest(f"{weights}{step}")
        metrics = {"loss": 1.0 / (step + 1)}
        if job.work.kind == "policy_optimization":
            metrics |= {"explained_variance": 0.6 - 0.05 * step, "value_bias": 0.25}
        journal.append(step + 1, metrics, time=time.time())
        progress.update(step + 1, metrics={"loss": 1.0 / (step + 1)}, headline="loss", tokens_per_second=1e4)
        if (step + 1) % CHECKPOINT_EVERY == 0 or preemption.requested():
            offset = journal.sync()
            state = {"step": step + 1, "weights": weights, "offset": offset}
            replace_file(checkpoint, json.dumps(state).encode())
            write_committed(job.scratch, step=step + 1, journal_offset=offset)
        if preemption.requested():
            raise preemption.Preempted(f"stopped after step {step + 1}")
    journal.close()
    return weights


POSITIONS_OF_A_ROW = 10


class OutOfMemoryError(RuntimeError):
    """An error with the name of torch's own, by which Vantage knows it."""


def exhaust_memory(job: StageJob) -> None:
    """Raise as if memory ran out, where more rows are computed at once than ``memory.txt`` leaves room for."""
    room = _number_for(job, "memory.txt")
    if room is None:
        return
    assert isinstance(job.work, SupervisedFineTuning)
    whole = _number_for(job, "rows.txt") or job.work.batch_size
    rows = job.work.pass_limits.rows_of(POSITIONS_OF_A_ROW, whole)
    if _number_for(job, "silent.txt") is None:
        computing(rows, rows * POSITIONS_OF_A_ROW)
    if rows > room:
        raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {rows}.00 MiB. GPU 0 is full.")


def hang(job: StageJob) -> None:
    """Wait for what never comes, in as many attempts as ``hang.txt`` says."""
    if job.attempt <= (_number_for(job, "hang.txt") or 0):
        threading.Event().wait()


def _number_for(job: StageJob, file: str) -> int | None:
    """Return the number beside the stage's name in a file of the workspace."""
    path = workspace_of(job) / file
    told = dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}
    return int(told[job.name]) if job.name in told else None


def _is_named(job: StageJob, file: str) -> bool:
    path = workspace_of(job) / file
    return path.exists() and path.read_text() == job.name


def mark(job: StageJob, event: str) -> None:
    with (workspace_of(job) / "events.txt").open("a") as file:
        file.write(f"{job.name} {event} {job.attempt}\n")


def workspace_of(job: StageJob) -> Path:
    """Return the workspace: ``scratch`` is ``<workspace>/store/scratch/<key>``."""
    return job.scratch.parents[2]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def refuse(job: StageJob) -> StageResult:
    raise ValueError("data.prompts: row 7 has no prompt; remove it")


def collect_equal_sides(job: StageJob) -> StageResult:
    """Do any kind of work as ``run_stage`` does it, but make pairs whose sides are the same text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if job.work.kind != "preference_collection":
        return run_stage(job)
    rows = [{"prompt": "1+1?", "chosen": "2", "rejected": "2"}] * 2
    for split in ("train", "validation", "test"):
        pq.write_table(pa.Table.from_pylist(rows), job.output / f"{split}.parquet")
    return StageResult(metrics={"train_rows": 2.0})
