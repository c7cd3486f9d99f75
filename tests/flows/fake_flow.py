"""The flow with fake stages behind it, as a deployment's entrypoint: ``fake_flow.pipeline``."""

from multiprocessing import forkserver

import schemas.records.attempt

schemas.records.attempt.RUN_STAGE = "tests.flows.fake_work.run_stage"
forkserver.set_forkserver_preload = lambda modules: None  # fake stages need no torch, which takes seconds

from flows.pipeline import pipeline  # noqa: E402

__all__ = ["pipeline"]
