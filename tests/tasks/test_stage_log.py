"""A stage's log has in plain lines its data, its model, where it began, what was kept, and its result."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.kills import killed_in
from vantage.models.folders import load_policy
from vantage.tasks.data.rows import read_rows
from vantage.tasks.stages import run_stage


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("vantage.tasks.")]


def test_sft_tells_its_data_its_model_its_steps_and_its_numbers(
    pipeline: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline.folder("sft")
    job = pipeline.job("sft")
    with caplog.at_level(logging.INFO, logger="vantage.tasks"):
        result = run_stage(job)
    told = lines(caplog)
    assert told[0] == "sft (sft), attempt 1, seed 5"
    rows = len(read_rows(job.inputs["data"], "train"))
    assert f"train: {rows} rows, 0 of them with a prompt that is too long" in told
    parameters = sum(each.numel() for each in load_policy(job.output).parameters())
    assert f"policy: {parameters:,} parameters, {parameters:,} of them trained, torch.float32 on cpu" in told
    assert any(line.startswith("begins at step 0 of ") for line in told)
    assert any("; saved" in line and "loss " in line and "tokens/s" in line for line in told)
    assert f"test_nll: {result.metrics['test_nll']:.6g}" in told
    assert told[-1].startswith("made ")


@pytest.mark.slow
def test_a_resumed_policy_tells_where_it_goes_on_and_what_it_keeps(
    pipeline: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.folder("policy")  # what it reads is there, so that nothing else is killed
    with killed_in(3, monkeypatch):
        run_stage(pipeline.job("policy", folder=tmp_path))
    with caplog.at_level(logging.INFO, logger="vantage.tasks"):
        run_stage(pipeline.job("policy", folder=tmp_path))
    told = lines(caplog)
    assert "goes on from the checkpoint of step 2 of 4" in told
    [measured] = [line for line in told if line.startswith("iteration 4: validation_score ")]
    assert measured.endswith(("; the best so far, kept", "; not kept"))
