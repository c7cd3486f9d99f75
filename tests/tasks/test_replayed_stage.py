"""A stage whose policy is sampled by replayed steps, as on a GPU but without the capture, reports what it replayed and resumes exactly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.uncaptured import Uncaptured
from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.test_presets_run import Case, job_of, preset
from vantage.ledger.journal import read
from vantage.models import replayed_steps
from vantage.schemas.metric_names import GRAPHS
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL

pytestmark = pytest.mark.slow


def job_in(folder: Path, pipeline: Any) -> StageJob:
    folder.mkdir(exist_ok=True)
    changes = {"iterations": 3, "checkpoint_every": 1, "validate_every": 100}
    return job_of(Case(preset("ppo", old_logprobs="policy"), changes), pipeline, folder)


def said(job: StageJob) -> list[dict[str, float]]:
    return [entry.metrics for entry in read(job.scratch / JOURNAL)]


def test_it_says_what_it_replayed_and_resumes_with_the_same_bits(
    pipeline: Any,
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = job_in(tmp_path / "plain", pipeline)
    run_stage(plain)
    assert not any(name in metrics for metrics in said(plain) for name in GRAPHS)

    monkeypatch.setattr(replayed_steps, "CAPTURES", {"cpu": Uncaptured})
    monkeypatch.setattr(replayed_steps, "FEWEST_TOKENS", 2)
    same_bytes_after_a_kill(
        run_stage,
        lambda folder: job_in(folder, pipeline),
        tmp_path,
        step=2,
        contents=contents,
        monkeypatch=monkeypatch,
    )
    for metrics, others in zip(said(job_in(tmp_path / "whole", pipeline)), said(plain), strict=True):
        assert metrics["graph_replays"] > metrics["graphs_captured"] > 0
        assert metrics["graph_fallbacks"] == 0
        assert metrics["sampler_gap"] < 1e-5, "the policy that trains is the one that sampled"
        assert metrics["response_length_mean"] == pytest.approx(others["response_length_mean"])
        assert metrics["score_mean"] == pytest.approx(others["score_mean"])
