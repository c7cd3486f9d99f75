"""The first loss or gradient that is not finite costs its optimiser step; the next ends the stage with its batch saved."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.kills import killed_in
from vantage.ledger.journal import read
from vantage.schemas.recipe.resolved import ResolvedSupervisedFineTuning
from vantage.tasks import sft
from vantage.tasks.data.examples import codec_of, read_completions
from vantage.tasks.stages import run_stage
from vantage.tasks.training import likelihood, nonfinite, optimization
from vantage.tasks.training.data_order import order_of
from vantage.tasks.training.nonfinite import TrainingDiverged
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.seeds import stage_seed
from vantage.tasks.updates import policy_losses

Contents = Callable[[Path], dict[str, bytes]]


def spoiled(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make loss and gradient of these optimiser steps NaN. Steps are counted from the stage's first attempt on."""
    accumulate = likelihood.accumulate_nll

    def spoiling(policy: Any, batch: Any, **options: Any) -> Any:
        found = accumulate(policy, batch, **options)
        assert nonfinite._current is not None
        if nonfinite._current.step in steps:
            nonfinite.spoil_gradient(policy.causal_lm)
            return type(found)(nll=math.nan, logprobs=found.logprobs)
        return found

    monkeypatch.setattr(sft, "accumulate_nll", spoiling)


def left_out(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the optimiser itself leave one step out, which must have the same result as a spoiled step."""
    take = optimization.take_step

    def taking(optimizer: Any, module: Any, **options: Any) -> float:
        assert nonfinite._current is not None
        if nonfinite._current.step == step:
            optimizer.zero_grad(set_to_none=True)
            return 0.0
        return take(optimizer, module, **options)

    monkeypatch.setattr(optimization, "take_step", taking)


def test_one_step_is_left_out_and_the_others_are_as_they_were(
    pipeline: Any, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = pipeline.job("sft"), pipeline.job("sft")
    with monkeypatch.context() as patched:
        spoiled(patched, 2)
        found = run_stage(job)
    with monkeypatch.context() as patched:
        left_out(patched, 2)
        expected = run_stage(other)
    assert found.metrics == expected.metrics
    assert contents(job.output) == contents(other.output)
    counted = {entry.step: entry.metrics.get("nonfinite_steps") for entry in read(job.scratch / JOURNAL)}
    assert {step: count for step, count in counted.items() if count} == {3: 1.0}
    [firing] = found.firings
    assert str(firing) == (
        "guard nonfinite_steps above 0, 1 report in a row: fired after step 3 (1); nothing was changed"
    )


@pytest.mark.parametrize("kill_in", [None, 3])
def test_the_second_ends_the_stage_and_its_batch_is_saved(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, kill_in: int | None, tmp_path: Path
) -> None:
    """The second one ends the stage also where an earlier attempt met the first one."""
    job = pipeline.job("sft", folder=tmp_path)
    spoiled(monkeypatch, 1, 4)
    if kill_in is not None:
        with killed_in(kill_in, monkeypatch):
            run_stage(job)
        job = pipeline.job("sft", folder=tmp_path)
    with pytest.raises(
        TrainingDiverged, match="the gradient's norm is nan at step 4; lower the learning rate"
    ) as error:
        run_stage(job)
    path = job.scratch / "diverged.safetensors"
    assert str(error.value).endswith(f"; its batch is in {path}")
    assert json.loads((job.scratch / "diverged.json").read_text())["step"] == 4
    assert isinstance(job.work, ResolvedSupervisedFineTuning) or job.work.kind == "sft"
    codec = codec_of(job, "init")
    train = read_completions(job.inputs["data"], "train", ["response"], codec)
    batch = train.batch(order_of(train, job.work, stage_seed(job)).batch(4))
    assert torch.equal(load_file(path)["input_ids"], batch.input_ids)


def test_without_guards_the_first_ends_the_stage(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = pipeline.job("sft", guards="off")
    spoiled(monkeypatch, 1)
    with pytest.raises(TrainingDiverged, match="at step 1; lower the learning rate"):
        run_stage(job)


def test_a_policy_whose_loss_is_not_finite_in_one_minibatch_learns_from_the_others(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the loss is infinite and its gradient would be finite, but the step is left out all the same."""
    job = pipeline.job("policy", iterations=2)
    totals, calls = policy_losses.LossSums.totals, []

    def spoiling(self: Any) -> dict[str, float]:
        found = totals(self)
        if "policy_loss" in found:
            calls.append(found)
            if len(calls) == 2:
                return found | {"policy_loss": math.inf}
        return found

    monkeypatch.setattr(policy_losses.LossSums, "totals", spoiling)
    result = run_stage(job)
    entries = list(read(job.scratch / JOURNAL))
    left_out = [entry.metrics.get("nonfinite_steps") for entry in entries]
    assert left_out == [2.0, None]  # the policy's step and the critic's
    assert len(calls) == 2 * 2 * 2
    assert all(math.isfinite(value) for value in entries[1].metrics.values())
    assert [firing.guard.metric for firing in result.firings] == ["nonfinite_steps"]
