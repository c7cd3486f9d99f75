"""Limit an engine to as many responses at once as fit into memory, for every kind of stage that samples."""

from dataclasses import replace
from typing import TypeVar

import torch

from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.stages import Rollouts
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.engine import LocalEngine, RolloutEngine
from vantage.tasks.training.found_limits import Taken, found_limits, sampling_limits, within_memory

Engine = TypeVar("Engine", bound=RolloutEngine)
Job = TypeVar("Job", bound=StageJob[Rollouts | RolloutCollection | PreferenceCollection | PolicyEvaluation])


def fit_to_memory(
    engine: Engine, job: Job, taken: Taken, *, device: torch.device, other: str | None = None
) -> tuple[Engine, Job]:
    """Return the engine and the job, both limited by the memory of this device; unchanged if no limit is found.

    Args:
        taken: the memory that the stage's passes need.
        other: role of a model that is measured after the stage's first one; see ``found_limits``.
    """
    is_here = isinstance(engine, LocalEngine)  # an engine of another kind has its own memory
    measured = taken if is_here else replace(taken, sampler=None)
    found = found_limits(job, measured, device=device, other=other)
    if found is None:
        return engine, job
    fitting = within_memory(job, found)
    if isinstance(engine, LocalEngine):
        given, rows = job.work.microbatch_tokens, job.work.rollout.max_rows
        most = sampling_limits(fitting.work.pass_limits, found, given=given, rows=rows)
        engine = replace(engine, limits=most)
    return engine, fitting
