"""Guards change no bit of a whole stage unless they fire, and a stage that they end equals one of a shorter recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.slow import slow
from tests.tasks.kills import killed_in
from tests.tasks.test_extended_stages import FAST, SLOW
from vantage.ledger.journal import read
from vantage.schemas.metric_names import ENSEMBLE, NONFINITE, OF_MACHINE, UNREADABLE_SHARE
from vantage.schemas.recipe.default_guards import guards_of
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.recipe.stage import Training
from vantage.schemas.records.firings import EndedEarly
from vantage.schemas.records.job import StageResult
from vantage.storage.measured_file import write_measured
from vantage.storage.refs import describe
from vantage.tasks.stages import run_stage
from vantage.tasks.training import attempt as attempt_module
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.watched import ask_to_finish

Contents = Callable[[Path], dict[str, bytes]]
NEVER = Guard(metric="grad_norm", above=1e9, action="stop")


def fires_at(metric: str, action: str, *, over: int) -> Guard:
    """Return a guard that fires after ``over`` reports: a norm is never negative."""
    return Guard.model_validate({"metric": metric, "above": -1e9, "over": over, "action": action})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward", "value", "policy"])
def test_guards_that_do_not_fire_change_no_bit(pipeline: Any, name: str, contents: Contents) -> None:
    silent, watching = (
        pipeline.job(name, guards=guards)
        for guards in ("off", (NEVER.model_copy(update={"metric": curve_of(name)}),))
    )
    results = [run_stage(job).model_dump(exclude={"firings"}) for job in (silent, watching)]
    assert results[0] == results[1]
    assert contents(silent.output) == contents(watching.output)
    rows = [
        [(entry.step, steady(entry.metrics)) for entry in read(job.scratch / JOURNAL)]
        for job in (silent, watching)
    ]
    assert rows[0] == rows[1]


def steady(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics without what depends on the clock and the machine."""
    return {name: each for name, each in metrics.items() if name not in OF_MACHINE}


def curve_of(name: str) -> str:
    return {"policy": "grad_norm_policy", "value": "value_loss"}.get(name, "grad_norm")


def test_a_policy_stage_that_a_guard_finishes_is_the_stage_with_fewer_iterations(
    pipeline: Any, contents: Contents
) -> None:
    """The guard fires in the first iteration of four; the second is the last and is validated, as if there were two.

    The critic is weighed, whose mean weight is over the iterations that there were.
    """
    algorithm = pipeline.job("policy").work.algorithm.model_copy(update={"critic_ev_threshold": -100.0})
    shorter = pipeline.job("policy", algorithm=algorithm, iterations=2, guards="off")
    guards = (fires_at("grad_norm_policy", "finish", over=1),)
    ended = pipeline.job("policy", algorithm=algorithm, guards=guards)
    expected, found = run_stage(shorter), run_stage(ended)
    assert found.ended_early == EndedEarly(step=2, total=4, by="guard", reason="grad_norm_policy")
    assert found.metrics == expected.metrics
    assert found.metrics["critic_weight_mean"] == 1.0
    assert contents(ended.output) == contents(shorter.output)
    assert str(found.firings[0]).startswith(
        "guard grad_norm_policy above -1e+09, 1 report in a row: fired after step 1"
    )


@pytest.mark.slow
def test_a_policy_stage_that_restores_its_best_hands_on_what_was_validated_before(pipeline: Any) -> None:
    """The stage validates after iterations 0 and 2, and does not look at what three iterations made."""
    job = pipeline.job("policy", guards=(fires_at("grad_norm_policy", "restore_best", over=3),))
    result = run_stage(job)
    assert result.ended_early is not None and result.ended_early.step == 3
    assert result.metrics["best_iteration"] in (0.0, 2.0)
    scores = [entry.metrics.get("validation_score") for entry in read(job.scratch / JOURNAL)]
    assert [score is not None for score in scores] == [False, True, False]


@pytest.mark.slow
def test_a_value_stage_ends_early_by_a_guard_and_is_the_shorter_stage(
    pipeline: Any, contents: Contents
) -> None:
    shorter = pipeline.job("value", iterations=3, guards="off")
    ended = pipeline.job("value", guards=(fires_at("value_loss", "finish", over=2),))
    expected, found = run_stage(shorter), run_stage(ended)
    assert found.ended_early == EndedEarly(step=3, total=4, by="guard", reason="value_loss")
    assert found.metrics == expected.metrics
    assert contents(ended.output) == contents(shorter.output)


def test_a_frozen_policy_does_not_move_while_its_critic_learns(pipeline: Any, tmp_path: Path) -> None:
    """Frozen from the second iteration on, it is what one iteration made; the critic goes on to the last."""
    frozen = pipeline.job(
        "policy", guards=(fires_at("value_loss", "freeze_policy", over=1),), validate_every=1, iterations=3
    )
    result = run_stage(frozen)
    assert result.ended_early is None
    entries = list(read(frozen.scratch / JOURNAL))
    assert ["policy_loss" in entry.metrics for entry in entries] == [True, False, False]
    assert all("value_loss" in entry.metrics for entry in entries)
    assert {entry.metrics["validation_score"] for entry in entries} == {
        entries[0].metrics["validation_score"]
    }
    norms = [entry.metrics["grad_norm_critic"] for entry in entries]
    assert len(set(norms)) == len(norms)
    newest = max((frozen.scratch / "checkpoints").iterdir(), key=lambda folder: folder.name)
    weights = load_file(newest / "tensors.safetensors")
    one = pipeline.job("policy", guards="off", validate_every=1, iterations=1)
    run_stage(one)
    after_one = load_file(
        max((one.scratch / "checkpoints").iterdir(), key=lambda folder: folder.name) / "tensors.safetensors"
    )
    for tensor, values in after_one.items():
        if tensor.startswith("policy.weights/"):
            assert torch.equal(weights[tensor], values), tensor
    critics = [tensor for tensor in weights if tensor.startswith("critic.weights/")]
    assert any(not torch.equal(weights[tensor], after_one[tensor]) for tensor in critics)


@pytest.mark.slow
@pytest.mark.parametrize("kill_in", [1, *slow(0, 2)])
def test_killed_around_a_firing_a_policy_stage_ends_with_the_same_bits(
    pipeline: Any, contents: Contents, kill_in: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    guards = (
        fires_at("grad_norm_policy", "finish", over=2),
        Guard(metric="value_loss", above=-1.0, over=1, action="freeze_policy"),
    )
    whole = pipeline.job("policy", guards=guards[:1])
    expected = run_stage(whole)
    cut = pipeline.job("policy", guards=guards[:1], folder=tmp_path / "cut")
    with killed_in(kill_in, monkeypatch):
        run_stage(cut)
    again = pipeline.job("policy", guards=guards[:1], folder=tmp_path / "cut")
    assert run_stage(again) == expected
    assert expected.ended_early is not None and expected.ended_early.step == 3
    assert contents(again.output) == contents(whole.output)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward", "value", "policy"])
def test_the_defaults_only_warn_and_are_about_curves_of_the_stage(pipeline: Any, name: str) -> None:
    job = pipeline.job(name)
    assert isinstance(job.work, Training)
    guards = guards_of(job.work)
    assert guards
    assert {guard.action for guard in guards} == {"warn"}
    run_stage(job)
    reported = {metric for entry in read(job.scratch / JOURNAL) for metric in entry.metrics}
    assert {guard.metric for guard in guards} - {*NONFINITE, *ENSEMBLE, UNREADABLE_SHARE} <= reported


def test_a_default_that_fires_is_recorded_and_seals_nothing(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The digest of an artifact does not depend on defaults, which later versions may change; a recipe's own guard is in it."""
    guard = fires_at("grad_norm", "warn", over=1)
    silent = run_stage(pipeline.job("sft", guards="off"))
    own = run_stage(pipeline.job("sft", guards=(guard,)))
    monkeypatch.setattr(attempt_module, "guards_of", lambda work: (guard,))
    default = run_stage(pipeline.job("sft"))
    assert [[firing.is_default for firing in each.firings] for each in (silent, default, own)] == [
        [],
        [True],
        [False],
    ]
    sealed = [
        measured_bytes(each, tmp_path / str(number)) for number, each in enumerate((silent, default, own))
    ]
    assert sealed[0] == sealed[1] != sealed[2]


def measured_bytes(result: StageResult, folder: Path) -> bytes:
    """Return ``metrics.json`` as it is sealed with an artifact."""
    folder.mkdir()
    (folder / "weights").write_text("x")
    placeholder = "0" * 64
    artifact = describe(
        {
            "kind": "policy",
            "parents": {},
            "metrics": result.metrics,
            "uncertainty": result.uncertainty,
            "firings": result.firings,
            "tokenizer_digest": placeholder,
        },
        stage_key=placeholder,
        digest=placeholder,
        files_digest=placeholder,
    )
    write_measured(folder, artifact)
    return (folder / "metrics.json").read_bytes()


OF_A_PERSON = {name: job for name, (job, _) in (FAST | SLOW).items() if ":" not in name}
"""Kind of stage, or a form of it → its job."""


@pytest.mark.parametrize(
    "name",
    ["policy", *(pytest.param(name, marks=pytest.mark.slow) for name in OF_A_PERSON if name != "policy")],
)
def test_a_person_ends_a_stage_of_any_kind_with_a_whole_artifact(
    pipeline: Any, name: str, tmp_path: Path
) -> None:
    """Asked before it begins, the stage does one step, and its artifact has the files of the stage that does all of them."""
    whole, asked = (OF_A_PERSON[name](pipeline, tmp_path / folder) for folder in ("whole", "asked"))
    expected = run_stage(whole)
    ask_to_finish(asked.scratch, run_id=asked.run_id, reason="good enough")
    found = run_stage(asked)
    ended = found.ended_early
    assert expected.ended_early is None
    assert ended is not None
    assert (ended.step, ended.by, ended.reason) == (1, "hand", "good enough")
    assert [entry.step for entry in read(asked.scratch / JOURNAL)] == [1]
    assert set(found.metrics) == set(expected.metrics)
    files = [sorted(path.name for path in job.output.iterdir()) for job in (whole, asked)]
    assert files[0] == files[1]
