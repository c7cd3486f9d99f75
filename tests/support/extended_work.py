"""Compute fake stages whose policy stage is a real loop of ``iterations`` steps: its ``test_score`` is the number of them."""

import os
import signal

import torch
from torch import nn

from tests.support.fake_work import WEIGHTS, digest, mark, workspace_of
from tests.support.fake_work import run_stage as run_fake_stage
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.stages import with_guards
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.stage_state import NoState
from vantage.tasks.training.watched import ask_to_finish

KILLED = "kill.txt"
"""A file in the workspace: its number is the step of the policy stage in which its process is killed, once."""

SAME = "same.txt"
"""A file in the workspace: each policy stage keeps the same weights, however long it is."""
ASKED = "finish.txt"
"""A file in the workspace: its number is the step in which a person asks the policy stage to finish."""
REALLY = "kill its process.txt"
"""A file beside it: the process dies by a signal, and not by ``Killed``."""


class Killed(BaseException):
    """Stands for a kill in the process of a test: nothing is saved on the way out."""


def run_stage(job: StageJob) -> StageResult:
    """Make one attempt at any kind of work."""
    work = job.work
    if not isinstance(work, PolicyOptimization):
        return run_fake_stage(job)
    mark(job, "started")
    killed = workspace_of(job) / KILLED
    network = nn.Linear(1, 1, bias=False)
    network.weight.data.fill_(0.0)
    with Attempt(
        job,
        total=work.iterations,
        modules={"network": network},
        optimizers={},
        state=NoState(),
        keeps_best=True,
    ) as attempt:
        attempt.best = attempt.best or {"weight": torch.zeros(1)}
        for step in attempt.remaining():
            if killed.exists() and int(killed.read_text()) == step:
                killed.unlink()
                if (workspace_of(job) / REALLY).exists():
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Killed
            network.weight.data.add_(1.0)
            asked = workspace_of(job) / ASKED
            if asked.exists() and int(asked.read_text()) == step:
                ask_to_finish(job.scratch, run_id=job.run_id, reason="enough")
            metrics = {"score_mean": float(step + 1), "loss": 1.0}
            attempt.finish_step(metrics, num_tokens=1, headline="score_mean")
    if (workspace_of(job) / SAME).exists():
        network.weight.data.fill_(1.0)
    (job.output / WEIGHTS).write_text(digest(str(network.weight.item())))
    mark(job, "finished")
    result = StageResult(metrics={"test_score": network.weight.item()}, tokenizer_digest=digest("tokenizer"))
    return with_guards(job, result)
