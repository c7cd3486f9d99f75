"""Let a process compute every stage with a fake one. Call it before anything of ``flows`` is imported, or in a forked process."""

import os
from importlib import import_module
from multiprocessing import forkserver
from typing import TYPE_CHECKING

import vantage.schemas.records.attempt
from tests.support.unsent import VARIABLE, send_nothing

if TYPE_CHECKING:
    from vantage.schemas.records.job import StageJob, StageResult

REAL = vantage.schemas.records.attempt.RUN_STAGE
FUNCTION = "FAKED_STAGES"
"""Name of the variable that tells a stage's process which function computes."""

_preload = forkserver.set_forkserver_preload


def compute_with(function: str) -> None:
    """Let ``function`` (``MODULE.NAME``) stand for ``vantage.tasks.stages.run_stage``."""
    os.environ[FUNCTION] = function
    vantage.schemas.records.attempt.RUN_STAGE = f"{__name__}.run_stage"
    forkserver.set_forkserver_preload = _light_preload
    if os.environ.get(VARIABLE):
        send_nothing()


def compute_really() -> None:
    """Let stages compute what they do outside tests, in a process that was forked from one with fake stages."""
    from vantage.flows.execution import execute
    from vantage.flows.sweeps.sweep import run_sweep

    for entry in (execute, run_sweep):
        assert entry.__kwdefaults__ is not None
        entry.__kwdefaults__["stage_function"] = REAL
    forkserver.set_forkserver_preload = _preload


def run_stage(job: "StageJob") -> "StageResult":
    """Compute a stage with the function that this process's parent was given."""
    module, _, name = os.environ[FUNCTION].rpartition(".")
    result: StageResult = getattr(import_module(module), name)(job)
    return result


def _light_preload(modules_names: list[str]) -> None:  # by the name that it replaces
    """Preload what every fake stage imports; none needs torch, which takes seconds to load."""
    _preload(
        ["tests.support.own_session", "tests.support.fake_work", "vantage.attempts.launchers.stage_process"]
    )
