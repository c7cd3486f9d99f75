"""Run stages whose own servers are the small server. Child processes run this module by name; no test imports it."""

import os
from pathlib import Path

from tests.support.fake_vllm_server import PROGRAM
from tests.tasks.alike import ADAM_EPS
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.rollout import own_servers
from vantage.tasks.stages import run_stage
from vantage.tasks.training import optimization, ranks

ROOT = Path(__file__).parents[2]


def run(job: StageJob) -> StageResult:
    """Do the stage; ``scratch`` has the process id of each rank."""
    os.environ["PYTHONPATH"] = str(ROOT)  # where the small server is found
    vars(own_servers)["PROGRAM"] = PROGRAM
    vars(own_servers)["find_spec"] = lambda name: True
    vars(optimization)["EPS"] = ADAM_EPS
    (job.scratch / f"pid-{ranks.rank()}").write_text(str(os.getpid()))
    return run_stage(job)
