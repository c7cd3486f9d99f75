"""Where memory runs out, the stage's progress says in a pass of how many rows, and half of them go on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.stages import run_stage
from tasks.training import passes
from tasks.training.progress import read_progress
from tasks.training.scratch import PROGRESS


@pytest.mark.parametrize("name", ["sft", "reward", "value", "policy"])
def test_half_the_rows_of_the_pass_that_did_not_fit_fit(
    name: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for one position less than the stage's largest pass with a gradient has, without ``microbatch_size``."""
    monkeypatch.setitem(passes.OVERHEAD, "cpu", 4)
    largest = room_of(name, None, pipeline, tmp_path / "whole", monkeypatch, room=None)
    with pytest.raises(torch.OutOfMemoryError):
        room_of(name, None, pipeline, tmp_path / "cut", monkeypatch, room=largest - 1)
    report = read_progress(pipeline.job(name, folder=tmp_path / "cut").scratch / PROGRESS)
    assert report is not None
    assert report.pass_rows is not None
    assert report.pass_rows > 1
    assert room_of(name, report.pass_rows // 2, pipeline, tmp_path / "half", monkeypatch, room=largest - 1)


def room_of(
    name: str,
    microbatch_size: int | None,
    pipeline: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    room: int | None,
) -> int:
    """The positions of the largest pass with a gradient; OutOfMemoryError where there is one of more than ``room``."""
    largest = 0
    whole = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        if torch.is_grad_enabled() and self.weight.requires_grad:
            if room is not None and ids.numel() > room:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {ids.shape}")
            largest = max(largest, ids.numel())
        return whole(self, ids)

    job = pipeline.job(name, folder=folder, microbatch_size=microbatch_size)  # makes its inputs
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Embedding, "forward", forward)
        run_stage(job)
    return largest
