"""Compute fake stages whose policy stage is a real loop with guards: its ``score_mean`` rises from 1 to 12, by 1 in each step."""

import torch
from torch import nn

from tests.support.fake_work import WEIGHTS, digest, mark
from tests.support.fake_work import run_stage as run_fake_stage
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.stages import with_guards
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.stage_state import NoState
from vantage.tasks.training.watched import ask_to_finish

STEPS = 12
ASKED = "asked to finish"
"""A file beside the journals: its number is the step in which a person asks the policy stage to finish."""
CLIPS = "clips"
"""A file there: with it, the policy stage reports a clip fraction at which a default guard warns."""


def run_stage(job: StageJob) -> StageResult:
    """Make one attempt at any kind of work."""
    if job.work.kind != "policy_optimization":
        return run_fake_stage(job)
    mark(job, "started")
    asked = job.scratch.parents[2] / ASKED
    network = nn.Linear(1, 1)
    network.weight.data.fill_(0.0)
    with Attempt(
        job, total=STEPS, modules={"network": network}, optimizers={}, state=NoState(), keeps_best=True
    ) as attempt:
        attempt.best = attempt.best or {"weight": torch.zeros(1)}
        for step in attempt.remaining():
            network.weight.data.add_(1.0)
            if asked.exists() and int(asked.read_text()) == step:
                ask_to_finish(job.scratch, run_id=job.run_id, reason="good enough")
            metrics = {"score_mean": float(step + 1), "loss": 1.0}
            if (job.scratch.parents[2] / CLIPS).exists():
                metrics["clip_fraction"] = 0.75
            attempt.finish_step(metrics, num_tokens=1, headline="score_mean")
    (job.output / WEIGHTS).write_text(digest(str(network.weight.item())))
    mark(job, "finished")
    return with_guards(
        job, StageResult(metrics={"score": network.weight.item()}, tokenizer_digest=digest("tokenizer"))
    )
