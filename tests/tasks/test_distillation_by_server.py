"""Distillation with a teacher behind a server: the losses are those of the same teacher in process, whatever fails on the way."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.fake_vllm_server import FakeServer, serving
from tests.tasks.kills import killed_in
from tests.tasks.test_distillation import VERIFIER, WORK, job_in
from vantage.ledger.journal import read
from vantage.models.folders import load_policy
from vantage.schemas.metric_names import LEAD_SHARE
from vantage.schemas.recipe.called_server import TeacherServer
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.metric import settings_of
from vantage.schemas.records.metrics import estimated_metric_names
from vantage.tasks.distillation import run
from vantage.tasks.rewards import answer_file, asking
from vantage.tasks.rewards.answer_file import answers_in
from vantage.tasks.rewards.asking import JudgeRefused, JudgeUnavailable
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.training.scratch import ANSWERS, JOURNAL
from vantage.tasks.updates.teacher_server import ServedTeacher

SHORT = {"kl": "sampled", "validation_samples": 8, "test_samples": 16, "reward": VERIFIER}


@pytest.fixture(scope="module")
def server(pipeline: Any) -> Iterator[FakeServer]:
    with serving(pipeline.folder("sft")) as [served]:
        served.model = load_policy(pipeline.folder("sft")).eval()
        yield served


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget all open files of answers, as a new process does."""
    monkeypatch.setattr(asking, "LONGEST_PAUSE", 0.05)
    answer_file.answer_file.cache_clear()
    return answer_file.answer_file.cache_clear


def served_job(
    pipeline: Any, folder: Path, url: str, *, model: str = "served", patience: float = 20.0, **changes: Any
) -> StageJob:
    """A job whose teacher is behind the server."""
    teacher = TeacherServer(url=url, model=model, request_seconds=5.0, patience_seconds=patience)
    job = job_in(pipeline, folder, **SHORT | changes)
    work = job.work.model_copy(update={"teacher": None, "teacher_server": teacher})
    inputs = {role: path for role, path in job.inputs.items() if role != "teacher"}
    return job.model_copy(update={"work": work, "inputs": inputs})


@dataclass(frozen=True)
class Done:
    """A stage that has ended."""

    job: StageJob
    result: StageResult

    @property
    def curve(self) -> list[float]:
        """``reverse_kl`` of each iteration."""
        return [entry.metrics["reverse_kl"] for entry in read(self.job.scratch / JOURNAL)]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Weights of the kept student."""
        return load_file(self.job.output / "model.safetensors")


@pytest.fixture(scope="module")
def held(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The stage with the teacher in its process."""
    job = job_in(pipeline, tmp_path_factory.mktemp("held"), **SHORT)
    return Done(job, run(job))


@pytest.fixture(scope="module")
def asked(pipeline: Any, server: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The stage with the same teacher behind a server that never fails."""
    job = served_job(pipeline, tmp_path_factory.mktemp("served"), server.url)
    return Done(job, run(job))


def test_a_served_teacher_gives_the_losses_of_one_in_process(held: Done, asked: Done) -> None:
    assert len(asked.curve) == WORK.iterations
    assert asked.curve == pytest.approx(held.curve, abs=1e-5)
    for name, weights in held.weights.items():
        torch.testing.assert_close(asked.weights[name], weights, atol=1e-5, rtol=1e-4)
    measured = {name: value for name, value in held.result.metrics.items() if "teacher_" not in name}
    assert asked.result.metrics == pytest.approx(measured, abs=1e-5)
