"""On-policy distillation: that it learns its teacher, what it measures, what it refuses, and that a kill leaves no trace."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.kills import same_bytes_after_a_kill, same_weights_in_half_the_micro_batch
from tests.tasks.small_models import load
from vantage.ledger.journal import read
from vantage.schemas.metric_names import (
    COMPILED,
    ENGINE,
    GRAPHS,
    NONFINITE,
    TERM_QUANTILES,
    UNCOMPILED,
    WATCHED,
)
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.metrics import curve_metric_names, headline_metric_names
from vantage.tasks.distillation import run
from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS
from vantage.tasks.rollout.selection import Selection
from vantage.tasks.training.scratch import JOURNAL

WORK = Distillation(
    kind="distillation",
    init="model",
    teacher="sft",
    reward="main",
    prompts="prompts",
    batch_size=16,
    minibatch_size=8,
    iterations=4,
    validate_every=2,
    validation_samples=16,
    learning_rate=1e-3,
    checkpoint_every=2,
)
VERIFIER = Reward(terms=(VerifierTerm(verifier="arithmetic"),))


def job_in(pipeline: Any, folder: Path, **changes: Any) -> StageJob:
    output = folder / "output"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    (folder / "scratch").mkdir(exist_ok=True)
    work = WORK.model_copy(update=changes)
    inputs = pipeline.inputs({"init": work.init, "teacher": work.teacher, "prompts": "prompts"})
    changes_of_job = {
        "name": "student",
        "work": work,
        "inputs": inputs,
        "digests": pipeline.digests(inputs),
        "rewards": {"main": VERIFIER},
        "scratch": folder / "scratch",
        "output": output,
    }
    job: StageJob = pipeline.job("sft").model_copy(update=changes_of_job)
    return job


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier of the mark before an answer, which the teacher has learnt to write."""
    monkeypatch.setitem(BUILTIN_FUNCTIONS, "arithmetic", lambda prompt, response, answer: "#" in response)


def test_the_student_becomes_its_teacher(marks: None, pipeline: Any, tmp_path: Path) -> None:
    job = job_in(pipeline, tmp_path, iterations=30, batch_size=32, minibatch_size=32, learning_rate=5e-3,
                 validate_every=15, validation_samples=64, test_samples=128)
    result = run(job)
    entries = list(read(job.scratch / JOURNAL))
    kl = [entry.metrics["reverse_kl"] for entry in entries]
    print(kl, result.metrics, result.uncertainty["teacher_lead_share"])
    assert 0
