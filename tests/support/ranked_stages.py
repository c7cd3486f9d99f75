"""Run a stage of several ranks that can be made to misbehave; child processes run this module by name, and no test imports it."""

import os
import time
from typing import cast

import torch
from torch import nn

from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.resolved import ResolvedSupervisedFineTuning
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.training import preemption, ranks
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.optimization import make_optimizer, update_weights
from vantage.tasks.training.passes import passes
from vantage.tasks.training.stage_state import NoState

STEPS = 40
MISBEHAVES_AFTER = 9
"""Steps before the one in which a rank misbehaves: what is saved then is step 5 (``checkpoint_every``)."""
SECONDS_A_STEP = 0.05
ROWS = 5


def train(job: StageJob) -> StageResult:
    """Regress on five rows, shared out over the ranks.

    ``misbehaves`` in scratch makes the last rank misbehave in the tenth step, once, in the way that the file says.
    """
    work = cast(ResolvedSupervisedFineTuning, job.work)
    network = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(network.weight)
    optimizer = make_optimizer(network, weight_decay=0.0)
    inputs = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
    (job.scratch / f"pid-{ranks.rank()}").write_text(str(os.getpid()))
    with Attempt(
        job, total=STEPS, modules={"network": network}, optimizers={"network": optimizer}, state=NoState()
    ) as attempt:
        began = attempt.step
        for step in attempt.remaining():
            for part in passes([1] * ROWS, PassLimits(rows=1)):
                error = network(inputs[part.rows]) - inputs[part.rows].sum(dim=1, keepdim=True)
                (part.weight * error.square().sum() / ROWS).backward()
            if step == MISBEHAVES_AFTER and ranks.rank() == ranks.world_size() - 1:
                misbehave(job)
            rates = update_weights(optimizer, network, work, step=step, total_steps=STEPS)
            attempt.finish_step({"loss": rates["grad_norm"]}, num_tokens=ROWS, headline="loss")
            time.sleep(SECONDS_A_STEP)
    return StageResult(
        metrics={
            "began": float(began),
            "ranks": float(ranks.world_size()),
            "threads": float(torch.get_num_threads()),
            **{f"weight_{i}": weight for i, weight in enumerate(network.weight.flatten().tolist())},
        }
    )


def misbehave(job: StageJob) -> None:
    """Misbehave once, in the way that the file says; the file is gone as soon as it has begun."""
    file = job.scratch / "misbehaves"
    how = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    if how == "refuses":
        raise ValueError("data.demonstrations: row 7 has no prompt; remove it")
    if how == "killed":
        os.kill(os.getpid(), 9)
    while how == "hangs" or (how == "waits to be stopped" and not preemption.requested()):
        time.sleep(0.05)
