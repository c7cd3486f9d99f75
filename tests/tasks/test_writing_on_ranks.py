"""Two ranks write checkpoints beside training with the bytes of those between two steps, and survive a rank that is lost in a write."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.fork_server import WITH_TORCH
from vantage.schemas.kinds import resolve_work
from vantage.schemas.records.job import StageJob
from vantage.tasks.training.checkpoint_folders import latest
from vantage.tasks.training.scratch import CHECKPOINTS

pytestmark = pytest.mark.slow

SECONDS = 300


def job_named(name: str, pipeline: Any, folder: Path) -> StageJob:
    found: StageJob = pipeline.job("sft", folder=folder / name, microbatch_size=3, checkpoint_every=1)
    return found.model_copy(update={"work": resolve_work(found.work), "name": name})


def start(folder: Path, jobs: list[StageJob], strategy: str, harm: str) -> subprocess.CompletedProcess[str]:
    file = folder / f"jobs-{harm}"
    file.write_text("".join(f"{job.model_dump_json()}\n" for job in jobs))
    return WITH_TORCH.run_main("tests.tasks.writing_on_ranks", str(file), strategy, harm, seconds=SECONDS)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_write_the_same_bytes_and_go_on_from_the_last_complete_checkpoint(
    strategy: str, pipeline: Any, tmp_path: Path
) -> None:
    plain, beside, cut = (job_named(name, pipeline, tmp_path) for name in ("plain", "beside", "cut"))
    ended = start(tmp_path, [plain, beside, cut], strategy, "kill")
    assert ended.returncode not in (0, 1), ended.stderr
    expected, found = (json.loads((job.scratch / "written.json").read_text()) for job in (plain, beside))
    assert len(expected) > 3
    assert found == expected
    checkpoint = latest(cut.scratch / CHECKPOINTS)
    assert checkpoint is not None and checkpoint.step == 1, "the second was not complete"

    full = start(tmp_path, [cut], strategy, "full")
    assert full.returncode == 1
    assert "No space left on device" in full.stderr
    checkpoint = latest(cut.scratch / CHECKPOINTS)
    assert checkpoint is not None and checkpoint.step == 2, "the first of this attempt"

    assert (ended := start(tmp_path, [cut], strategy, "none")).returncode == 0, ended.stderr
    weights, whole = (load_file(job.output / "model.safetensors") for job in (cut, plain))
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
