"""A stage that goes on from the training state of a shorter one ends with the bits of the stage that was never cut."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks import test_best_of_n, test_dpo, test_presets_run
from tests.tasks.kills import killed_in
from tests.tasks.test_stages_on_ranks import result_of, start
from vantage.ledger.journal import read
from vantage.schemas.kinds import resolve_work
from vantage.schemas.metric_names import OF_MACHINE
from vantage.schemas.recipe.extending import PREVIOUS_STATE, with_length
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.stages import run_stage
from vantage.tasks.training.kept_state import write_kept_state
from vantage.tasks.training.scratch import JOURNAL

Contents = Callable[[Path], dict[str, bytes]]
Job = Callable[[Any, Path], StageJob]
"""Function of the small pipeline and a folder that returns the job."""


def state_of(job: StageJob, folder: Path) -> Path:
    """Return the training state that a finished stage leaves."""
    folder.mkdir()
    assert write_kept_state(job.scratch, folder) is not None
    return folder


def going_on(job: StageJob, state: Path) -> StageJob:
    """Return the job of a stage that goes on from a training state."""
    return job.model_copy(update={"inputs": {**job.inputs, PREVIOUS_STATE: state}})


def made(pipeline: Any, name: str) -> tuple[StageResult, StageJob]:
    """Return the result and the job of a stage that the small pipeline has done."""
    result: StageResult = pipeline.result(name)
    job: StageJob = pipeline.job(name)
    folder = pipeline.root / name
    return result, job.model_copy(update={"scratch": folder / "scratch", "output": folder / "output"})


def steady(job: StageJob) -> list[tuple[int, dict[str, float]]]:
    """Return the curves without what depends on the clock and the machine."""
    return [
        (entry.step, {name: each for name, each in entry.metrics.items() if name not in OF_MACHINE})
        for entry in read(job.scratch / JOURNAL)
    ]


def shorter_and_longer(pipeline: Any, folder: Path, **changes: object) -> tuple[StageResult, StageJob]:
    """Run two iterations of the policy stage, then the stage of four that goes on from them."""
    whole = pipeline.job("policy", **changes)
    shorter = whole.model_copy(update={"work": with_length(whole.work, 2)})
    run_stage(shorter)
    longer = going_on(pipeline.job("policy", **changes), state_of(shorter, folder))
    return run_stage(longer), longer


def of_kind(name: str, **changes: object) -> Job:
    return lambda pipeline, folder: pipeline.job(name, folder=folder, **changes)


def of_preset(name: str) -> Job:
    def job(pipeline: Any, folder: Path) -> StageJob:
        found: StageJob = test_presets_run.job_of(test_presets_run.CASES[name], pipeline, folder)
        changes = {"validate_every": 1}  # a longer stage measures after the shorter one's last iteration too
        return found.model_copy(update={"work": found.work.model_copy(update=changes)})

    return job


FAST: dict[str, tuple[Job, float]] = {"sft": (of_kind("sft"), 0.2), "policy": (of_kind("policy"), 2)}
SLOW: dict[str, tuple[Job, float]] = {
    "reward": (of_kind("reward"), 0.1),
    "value": (of_kind("value"), 2),
    "critic with its optimiser": (of_kind("value", keep_optimizer=True), 2),
    "adapters": (of_kind("policy", lora=Lora(rank=4, alpha=8.0)), 2),
    "dpo": (lambda pipeline, folder: test_dpo.job_in(pipeline, folder, reference="model"), 0.1),
    "best of n": (
        lambda pipeline, folder: test_best_of_n.job_in(pipeline, folder, iterations=2, validate_every=1),
        1,
    ),
    **{f"policy: {name}": (of_preset(name), 1) for name in test_presets_run.CASES},
}
"""Name → the job of the whole stage, and the length of the shorter one."""


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_stage_in_two_parts_is_the_stage_in_one(
    pipeline: Any, name: str, tmp_path: Path, contents: Contents
) -> None:
    job_in, length = (FAST | SLOW)[name]
    for folder in ("whole", "shorter", "longer"):
        (tmp_path / folder).mkdir()
    if name in ("sft", "reward", "value", "policy"):  # these are left as they are
        expected, whole = made(pipeline, name)
    else:
        whole = job_in(pipeline, tmp_path / "whole")
        expected = run_stage(whole)
    shorter = job_in(pipeline, tmp_path / "shorter")
    run_stage(shorter.model_copy(update={"work": with_length(shorter.work, length)}))
    longer = going_on(job_in(pipeline, tmp_path / "longer"), state_of(shorter, tmp_path / "state"))
    assert run_stage(longer) == expected
    assert contents(longer.output) == contents(whole.output)
    assert steady(longer) == steady(whole)
    assert len(steady(shorter)) < len(steady(whole))
    assert contents(state_of(longer, tmp_path / "again")) == contents(state_of(whole, tmp_path / "kept"))


@pytest.mark.slow
def test_a_kept_state_is_all_that_moves_and_nothing_that_a_clock_decides(
    pipeline: Any, tmp_path: Path, contents: Contents
) -> None:
    _, one = made(pipeline, "policy")
    other = pipeline.job("policy")
    run_stage(other)
    states = [state_of(job, tmp_path / str(place)) for place, job in enumerate((one, other))]
    assert contents(states[0]) == contents(states[1])
    parts = {name.partition("/")[0] for name in load_file(states[0] / "tensors.safetensors")}
    assert parts == {"best", "policy.weights", "policy.optimizer", "critic.weights", "critic.optimizer"}
    assert json.loads((states[0] / "state.json").read_text())["step"] == 4
    assert [entry.time for entry in read(states[0] / "curves.jsonl")] == [0.0] * 4


def test_a_longer_stage_that_is_killed_goes_on_from_its_own_checkpoint(
    pipeline: Any,
    tmp_path: Path,
    contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The stage is killed before its first checkpoint, and again after one; each time the next attempt ends with the
    same bits.
    """
    whole = pipeline.job("policy", iterations=6)
    expected = run_stage(whole)
    shorter = pipeline.job("policy", iterations=2)
    run_stage(shorter)
    state = state_of(shorter, tmp_path / "state")

    def job() -> StageJob:
        return going_on(pipeline.job("policy", iterations=6, folder=tmp_path / "cut"), state)

    for step in (3, 5):
        with killed_in(step, monkeypatch):
            run_stage(job())
    again = job()
    with caplog.at_level("INFO"):
        assert run_stage(again) == expected
    assert "goes on from the checkpoint of step 4 of 6" in caplog.text
    assert contents(again.output) == contents(whole.output)
    assert steady(again) == steady(whole)


@pytest.mark.slow
def test_guards_of_a_longer_stage_have_seen_the_curves_of_the_shorter_one(
    pipeline: Any, tmp_path: Path, contents: Contents
) -> None:
    """Three reports in a row, of which two are the shorter stage's: the guard fires at the first step of the longer one."""
    guards = (Guard(metric="grad_norm_policy", above=-1e9, over=3, action="warn"),)
    whole = pipeline.job("policy", guards=guards)
    expected = run_stage(whole)
    found, longer = shorter_and_longer(pipeline, tmp_path / "state", guards=guards)
    assert [firing.step for firing in expected.firings if not firing.is_default] == [3]
    assert found.firings == expected.firings
    assert contents(longer.output) == contents(whole.output)


def test_a_stage_that_stopped_before_its_last_step_leaves_no_state(pipeline: Any, tmp_path: Path) -> None:
    """A longer one would have stopped there too: it has nothing to go on with."""
    impatient = pipeline.job("value", patience=1, learning_rate=1e-30, iterations=4)
    run_stage(impatient)
    assert len(steady(impatient)) < 4
    (tmp_path / "state").mkdir()
    assert write_kept_state(impatient.scratch, tmp_path / "state") is None
    assert not list((tmp_path / "state").iterdir())


def test_no_state_is_left_where_the_last_checkpoint_is_damaged(pipeline: Any, tmp_path: Path) -> None:
    """The one before it is of an earlier step than the artifact."""
    job = pipeline.job("sft")
    run_stage(job)
    newest = max((job.scratch / "checkpoints").iterdir(), key=lambda folder: folder.name)
    tensors = newest / "tensors.safetensors"
    tensors.chmod(0o644)
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x00\x01")
    (tmp_path / "state").mkdir()
    assert write_kept_state(job.scratch, tmp_path / "state") is None


@pytest.mark.slow
def test_the_last_bits_of_a_longer_stage_are_not_the_shorter_ones(pipeline: Any, tmp_path: Path) -> None:
    """The other tests of this file rely on this: a stage that ignored its longer length would pass them."""
    _, longer = shorter_and_longer(pipeline, tmp_path / "state")
    last = load_file(state_of(longer, tmp_path / "last") / "tensors.safetensors")
    first = load_file(tmp_path / "state" / "tensors.safetensors")
    name = next(each for each in first if each.startswith("policy.weights/") and first[each].dim() == 2)
    assert not torch.equal(first[name], last[name])


@pytest.mark.slow
def test_a_stage_in_two_parts_on_two_ranks_is_the_stage_in_one_on_two(
    pipeline: Any, tmp_path: Path, contents: Contents
) -> None:
    def job(name: str, iterations: int) -> StageJob:
        (tmp_path / name).mkdir()
        found: StageJob = pipeline.job("policy", folder=tmp_path / name, iterations=iterations)
        return found.model_copy(update={"work": resolve_work(found.work)})

    whole, shorter = job("whole", 4), job("shorter", 2)
    start(2, tmp_path / "jobs", [whole, shorter])
    longer = going_on(job("longer", 4), state_of(shorter, tmp_path / "state"))
    start(2, tmp_path / "again", [longer])
    assert result_of(longer, 0) == result_of(whole, 0)
    assert result_of(longer, 1).metrics == result_of(whole, 1).metrics
    assert contents(longer.output) == contents(whole.output)
    assert steady(longer) == steady(whole)
