"""Has a process compute every stage with a fake one; to be called before anything of ``flows`` is imported."""

from multiprocessing import forkserver

import vantage.schemas.records.attempt

_preload = forkserver.set_forkserver_preload


def compute_with(function: str) -> None:
    """Let ``function`` (``MODULE.NAME``) stand for ``vantage.tasks.stages.run_stage``."""
    vantage.schemas.records.attempt.RUN_STAGE = function
    forkserver.set_forkserver_preload = _light_preload


def _light_preload(modules_names: list[str]) -> None:  # by the name that it replaces
    """Preload what every fake stage imports; none needs torch, which takes seconds to load."""
    _preload(
        ["tests.support.own_session", "tests.support.fake_work", "vantage.attempts.launchers.stage_process"]
    )
