"""Where memory runs out in a pass, the stage's progress names the pass's positions, and the stage goes on with half of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.slow import slow
from vantage.ledger.journal import read
from vantage.tasks.stages import run_stage
from vantage.tasks.training import cuts
from vantage.tasks.training.progress import read_progress
from vantage.tasks.training.scratch import JOURNAL, PROGRESS

pytestmark = pytest.mark.slow

SHORTER = {"iterations": 1, "validation_samples": 4}


@pytest.mark.parametrize("name", ["sft", "reward", *slow("value", "policy")])
def test_half_the_positions_of_the_pass_that_did_not_fit_fit(
    name: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has room for one position less than the stage's largest pass with a gradient has without a bound."""
    monkeypatch.setitem(cuts.OVERHEAD, "cpu", 4)
    largest = room_of(name, None, pipeline, tmp_path / "whole", monkeypatch, room=None)
    with pytest.raises(torch.OutOfMemoryError):
        room_of(name, None, pipeline, tmp_path / "cut", monkeypatch, room=largest - 1)
    report = read_progress(pipeline.job(name, folder=tmp_path / "cut").scratch / PROGRESS)
    assert report is not None
    assert report.pass_rows is not None
    assert report.pass_rows > 1
    assert report.pass_tokens == largest
    half = room_of(name, largest // 2, pipeline, tmp_path / "half", monkeypatch, room=largest - 1)
    assert half <= largest // 2


@pytest.mark.parametrize("name", ["sft", "reward", *slow("value", "policy")])
def test_a_budget_changes_no_weight_and_pads_little(
    name: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of half the positions that the largest would have train the same weights, but for rounding. Padding is at
    most that of unbounded passes, or a twentieth, because a bound may put rows of one length beside others."""
    largest = room_of(name, None, pipeline, tmp_path / "whole", monkeypatch, room=None)
    assert room_of(name, largest // 2, pipeline, tmp_path / "cut", monkeypatch, room=None) <= largest // 2
    whole, cut = (pipeline.job(name, folder=tmp_path / each) for each in ("whole", "cut"))
    for file in whole.output.glob("*.safetensors"):
        there, here = load_file(file), load_file(cut.output / file.name)
        for tensor, weights in there.items():
            torch.testing.assert_close(here[tensor], weights, atol=1e-5, rtol=1e-4)
    said, unbounded = (
        [entry.metrics["padding_share"] for entry in read(job.scratch / JOURNAL)] for job in (cut, whole)
    )
    assert sum(said) / len(said) <= max(0.05, sum(unbounded) / len(unbounded))


def room_of(
    name: str,
    microbatch_tokens: int | None,
    pipeline: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    room: int | None,
) -> int:
    """Return the positions of the largest pass with a gradient. One of more than ``room`` raises OutOfMemoryError."""
    largest = 0
    whole = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        if torch.is_grad_enabled() and self.weight.requires_grad:
            if room is not None and ids.numel() > room:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {ids.shape}")
            largest = max(largest, ids.numel())
        return whole(self, ids)

    shorter = SHORTER if name in ("value", "policy") else {}
    job = pipeline.job(
        name, folder=folder, microbatch_tokens=microbatch_tokens, **shorter
    )  # this makes the stage's inputs
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Embedding, "forward", forward)
        run_stage(job)
    return largest
