"""On-policy distillation learns its teacher, measures it, refuses wrong settings, and shows no trace of a kill."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.distillation_jobs import VERIFIER, job_in
from tests.tasks.kills import same_bytes_after_a_kill, same_weights_in_half_the_micro_batch
from vantage.ledger.journal import read
from vantage.models.adapter_check import WEIGHTS
from vantage.models.adapters import base_of
from vantage.schemas.metric_names import (
    ANSWERS,
    COMPILED,
    ENGINE,
    GRAPHS,
    NONFINITE,
    TERM_QUANTILES,
    UNCOMPILED,
    VALIDATION_TERMS,
    WATCHED,
)
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.metrics import curve_metric_names, headline_metric_names
from vantage.schemas.records.verdicts import check_gate
from vantage.tasks.distillation import DistillationState, run
from vantage.tasks.rewards.model_scores import TokenizersDiffer
from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS
from vantage.tasks.rollout.selection import Selection
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.stage_state import state_from_json


@pytest.fixture
def colons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a verifier of a sign that the teacher has learnt to write, and the untrained student writes by chance."""
    monkeypatch.setitem(BUILTIN_FUNCTIONS, "arithmetic", lambda prompt, response, answer: ":" in response)


@pytest.mark.slow
def test_the_student_becomes_its_teacher(colons: None, pipeline: Any, tmp_path: Path) -> None:
    """The KL falls to a tenth, the score rises to the teacher's, and a gate on the share of its lead opens at 95 %."""
    job = job_in(
        pipeline,
        tmp_path,
        reward=VERIFIER,
        iterations=16,
        batch_size=32,
        minibatch_size=32,
        learning_rate=5e-3,
        validate_every=8,
        validation_samples=64,
        test_samples=256,
    )
    result = run(job)
    kl = [entry.metrics["reverse_kl"] for entry in read(job.scratch / JOURNAL)]
    assert kl[-1] < kl[0] / 10, kl
    assert result.metrics["kl_to_teacher"] == pytest.approx(kl[-1], rel=0.5)
    measured = {name: value for name, value in result.metrics.items() if value is not None}
    initial, final, taught = (measured[f"{name}_score"] for name in ("initial", "test", "teacher"))
    assert taught > initial + 0.3
    assert measured["teacher_lead_share"] == pytest.approx((final - initial) / (taught - initial))
    assert measured["teacher_lead_share"] == pytest.approx(1, abs=0.3)
    gate = Gate(metric="teacher_lead_share", at_least=0.5, confidence=0.95)
    verdict = check_gate(gate, result.metrics, result.uncertainty)
    assert verdict.passed and verdict.interval is not None, str(verdict)


def test_a_teacher_without_a_lead_leaves_the_share_undefined(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(BUILTIN_FUNCTIONS, "arithmetic", lambda prompt, response, answer: True)
    result = run(job_in(pipeline, tmp_path, reward=VERIFIER, iterations=1))
    assert result.metrics["teacher_lead_share"] is None
    assert (result.metrics["initial_score"], result.metrics["teacher_score"]) == (1.0, 1.0)
    assert "teacher_lead_share is undefined" in caplog.text
    verdict = check_gate(Gate(metric="teacher_lead_share", at_least=-1.0), result.metrics, result.uncertainty)
    assert not verdict.passed and "no lead to share" in str(verdict)


@pytest.mark.slow
def test_the_student_that_scores_best_on_validation_prompts_is_the_artifact(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Students are scored before training and after each of three iterations. None is better than the first."""
    scores = iter([9.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(Selection, "score", lambda *_: next(scores))
    job = job_in(pipeline, tmp_path, iterations=3, validate_every=1)
    result = run(job)
    kept = load_file(job.output / "model.safetensors")
    start = load_file(pipeline.folder("model") / "model.safetensors")
    assert result.metrics["best_iteration"] == 0
    assert all(torch.equal(tensor, start[name]) for name, tensor in kept.items())
    assert result.metrics["teacher_lead_share"] in (0.0, None), "it has gained nothing"
    assert result.metrics["test_score"] == result.metrics["initial_score"]


def test_a_teacher_of_another_tokenizer_is_refused(pipeline: Any, tmp_path: Path) -> None:
    job = job_in(pipeline, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(job.inputs["teacher"], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    job = job.model_copy(update={"inputs": {**job.inputs, "teacher": other}})
    with pytest.raises(
        TokenizersDiffer,
        match="teacher='sft' has another tokenizer or chat template than init='model'.* use a teacher of the student's family",
    ):
        run(job)
    assert not list(job.output.iterdir())


def test_a_teacher_with_another_number_of_logits_is_refused(pipeline: Any, tmp_path: Path) -> None:
    """A larger model of a family may have more padding rows in its embeddings."""
    from vantage.models.folders import load_policy, load_tokenizer, save_policy

    job = job_in(pipeline, tmp_path)
    teacher = load_policy(job.inputs["teacher"])
    size = teacher.config.vocab_size
    teacher.resize_token_embeddings(size + 8)
    save_policy(teacher, load_tokenizer(job.inputs["teacher"]), tmp_path / "padded")
    job = job.model_copy(update={"inputs": {**job.inputs, "teacher": tmp_path / "padded"}})
    with pytest.raises(
        TokenizersDiffer, match=f"teacher='sft' has {size + 8} logits a token, .* has {size},"
    ):
        run(job)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_killed_and_run_again_it_gives_the_same_bytes(
    step: int,
    pipeline: Any,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stage is killed before the first checkpoint, and after it; then the scores of the lead are those of the
    checkpoint.
    """
    same_bytes_after_a_kill(
        run, partial(job_in, pipeline), tmp_path, step=step, contents=contents, monkeypatch=monkeypatch
    )


def test_the_scores_of_the_lead_go_through_a_checkpoint_bit_for_bit() -> None:
    state = DistillationState(best=0.1, initial_scores=(0.1, 1 / 3), teacher_scores=(2 / 3, -1e-17))
    saved = json.loads(json.dumps(asdict(state)))
    assert state_from_json(DistillationState(), saved, path="state") == state


@pytest.mark.slow
def test_out_of_memory_it_ends_with_the_same_weights_in_half_the_micro_batch(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_weights_in_half_the_micro_batch(
        run, partial(job_in, pipeline), tmp_path, microbatch_size=None, half=4, monkeypatch=monkeypatch
    )


@pytest.mark.slow
def test_it_reports_exactly_the_metrics_of_the_page(pipeline: Any, tmp_path: Path) -> None:
    job = job_in(pipeline, tmp_path)
    result = run(job)
    assert set(result.metrics) == headline_metric_names("distillation") - {
        *UNCOMPILED,
        "validation_watch_score",
    }
    written = {name for entry in read(job.scratch / JOURNAL) for name in entry.metrics}
    named = {name.replace("score_mean_reward", "score_mean_TERM") for name in written}
    assert named == curve_metric_names("distillation") - {
        *(*GRAPHS, *ENGINE, *COMPILED, *NONFINITE, *WATCHED, *TERM_QUANTILES, *VALIDATION_TERMS, *ANSWERS),
        "seconds_beside",
    }


@pytest.mark.slow
def test_adapters_are_trained_alone_and_the_teacher_may_have_some(
    lora_pipeline: Any, tmp_path: Path, contents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student's adapters begin anew on the base that the teacher's adapters have too; a kill changes no byte."""
    lora = Lora(rank=4, alpha=8.0)
    of = partial(job_in, lora_pipeline, lora=lora, reward=VERIFIER)
    before = contents(lora_pipeline.folder("sft"))
    same_bytes_after_a_kill(run, of, tmp_path, step=3, contents=contents, monkeypatch=monkeypatch)
    output = tmp_path / "whole" / "output"
    assert (output / WEIGHTS).is_file() and not (output / "model.safetensors").exists()
    assert base_of(output) is not None
    assert contents(lora_pipeline.folder("sft")) == before
    kl = [entry.metrics["reverse_kl"] for entry in read(tmp_path / "whole" / "scratch" / JOURNAL)]
    assert kl[-1] < kl[0]
