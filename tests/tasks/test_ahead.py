"""Rollouts are sampled while the ones before train: by the right weights, with the right importance and equal bits."""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.small_models import models_of
from tests.tasks.test_presets_run import BATCH, Case, curve, job_of, preset, run_in_two_attempts
from vantage.ledger.journal import read
from vantage.models.pass_counts import taken_counts
from vantage.models.sampling import Samples, sample
from vantage.schemas.recipe.rollout import SampledAhead
from vantage.schemas.records.job import StageJob
from vantage.tasks import policy_optimization
from vantage.tasks.data.examples import read_prompts
from vantage.tasks.rollout import ahead as ahead_engine
from vantage.tasks.rollout import fitting_engine
from vantage.tasks.rollout.ahead import AheadEngine
from vantage.tasks.rollout.engine import LocalEngine
from vantage.tasks.stages import run_stage
from vantage.tasks.training import preemption, progress
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.seeds import derive_seed, stage_seed
from vantage.tasks.updates import policy_update
from vantage.tasks.updates.estimates import minibatch_advantages

Contents = Callable[[Path], dict[str, bytes]]
ITERATIONS = 4
CASES = {
    "grpo": Case(preset("grpo"), {}),
    "ppo": Case(preset("ppo"), {}),
    "dapo": Case(preset("dapo", max_sampling_rounds=2), {}),
}


def job_in(folder: Path, name: str, pipeline: Any, **changes: Any) -> StageJob:
    folder.mkdir(exist_ok=True)
    case = CASES[name]
    work = {
        "rollout": {"ahead": 1, "importance_cap": 1.1},
        "iterations": ITERATIONS,
        "learning_rate": 2e-3,
        "checkpoint_every": 1,
        **changes,
    }
    return job_of(Case(case.algorithm, work), pipeline, folder)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for weight in model.state_dict().values():
        found.update(weight.detach().numpy().tobytes())
    return found.hexdigest()


def test_a_rollout_is_of_the_policy_before_the_last_update(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path, "grpo", pipeline)
    batches = {derive_seed(stage_seed(job), "sampling", number): number for number in range(ITERATIONS)}
    sampled_by: dict[int, str] = {}
    threads: dict[int, str] = {}
    before_update: list[str] = []
    sample_own, update = LocalEngine.sample_own, policy_update.update

    def sampled(self: LocalEngine, *args: Any, seed: int, **named: Any) -> Samples:
        if seed in batches:
            sampled_by[batches[seed]] = digest(self.policy.causal_lm)
            threads[batches[seed]] = threading.current_thread().name
        return sample_own(self, *args, seed=seed, **named)

    def updated(networks: Any, *args: Any, **named: Any) -> Any:
        before_update.append(digest(networks.policy.causal_lm))
        return update(networks, *args, **named)

    monkeypatch.setattr(LocalEngine, "sample_own", sampled)
    monkeypatch.setattr(policy_optimization, "update", updated)
    run_stage(job)
    assert len(set(before_update)) == ITERATIONS
    assert sampled_by == {0: before_update[0], 1: before_update[0], 2: before_update[1], 3: before_update[2]}
    assert threads == {0: "MainThread"} | dict.fromkeys((1, 2, 3), "sampling ahead")


def test_only_what_was_begun_is_taken(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other prompts, another number of responses, another seed and greedy responses are sampled by the present policy.
    A rollout that was begun is taken once, with its cost, also by an engine to which a checkpoint gave it.
    """
    job = pipeline.job("sft").model_copy(update={"inputs": {"init": pipeline.folder("sft")}})
    models = models_of(job, rewarded=False)
    prompts = read_prompts(pipeline.folder("prompts"), "train", models.codec).ids[:3]
    weights = list(models.policy.causal_lm.parameters())
    asked: dict[str, Any] = {"prompts": prompts, "count": 2, "seed": 2}
    others: list[dict[str, Any]] = [
        {"prompts": prompts[::-1]},
        {"prompts": prompts[:2], "count": 3},
        {"seed": 3},
        {"greedy": True},
    ]
    beside: list[bool] = []

    def noted(*args: Any, is_beside_another: bool, **named: Any) -> Samples:
        beside.append(is_beside_another)
        return sample(*args, is_beside_another=is_beside_another, **named)

    taken_counts()
    before, cost = models.engine.generate(**asked), taken_counts()
    with AheadEngine(models.engine) as ahead, monkeypatch.context() as patched:
        patched.setattr("vantage.tasks.rollout.engine.sample", noted)
        ahead.begin(prompts, count=2, seed=2)
        saved = ahead.tensors()
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1.1)
        changed = [ahead.generate(**asked | other) for other in others]
        assert not ahead.took_begun
        taken_counts()
        begun = ahead.generate(**asked)
        assert ahead.took_begun
        assert taken_counts() == cost
        after = ahead.generate(**asked)
        ahead.begin(prompts, count=2, seed=4)
        assert not ahead.took_begun
    assert beside == [True] * len(beside)
    assert (begun.responses, begun.ended) == (before.responses, before.ended)
    for found, expected in zip(begun.logprobs, before.logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    assert len(set(map(len, before.responses))) > 1
    assert True in before.ended
    assert False in before.ended
    assert changed == [models.engine.generate(**asked | other) for other in others]
    assert after == models.engine.generate(**asked)
    assert after.responses != before.responses

    resumed = AheadEngine(models.engine)
    resumed.restore(saved)
    taken_counts()
    assert resumed.generate(**asked) == begun
    assert taken_counts() == cost
    assert resumed.took_begun
    resumed.restore(AheadEngine(models.engine).tensors())
    assert resumed.generate(**asked) == after


@pytest.mark.slow
def test_advantages_are_weighted_by_capped_ratios(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path, "ppo", pipeline)
    minibatch_of = policy_update.minibatch_of
    means: list[tuple[float, float]] = []

    def checked(rollout: Any, estimates: Any, rows: Any, work: Any, **named: Any) -> Any:
        found = minibatch_of(rollout, estimates, rows, work, **named)
        mask = rollout.sequences.response_mask.numpy()
        ratios = np.exp((rollout.logprobs - rollout.sampled.sampler_logprobs).double().numpy())
        weights = np.where(mask, np.minimum(ratios, 1.1), 0.0)
        means.append((weights[mask].mean(), (ratios[mask] > 1.1).mean()))
        plain = minibatch_advantages(estimates.advantages[rows], estimates.policy_mask[rows], work.algorithm)
        np.testing.assert_allclose(
            found.advantages.numpy(), plain.numpy() * weights[rows.numpy()], rtol=1e-5, atol=1e-6
        )
        return found

    monkeypatch.setattr(policy_update, "minibatch_of", checked)
    run_stage(job)
    said = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    steps = len(means) // ITERATIONS
    for metrics, (weight, capped) in zip(said, means[::steps], strict=True):
        assert metrics["importance_weight"] == pytest.approx(weight, rel=1e-5)
        assert metrics["importance_capped"] == pytest.approx(capped, abs=1e-9)
    assert said[0]["importance_weight"] == pytest.approx(1, abs=1e-5), "of the policy as it is"
    assert all(abs(each["importance_weight"] - 1) > 1e-4 for each in said[1:])
    assert max(each["importance_capped"] for each in said) > 0
    assert ["sampler_gap" in each for each in said] == [True, False, False, False]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_ratio_to_the_sampler_is_the_only_weight(ahead: int, pipeline: Any, tmp_path: Path) -> None:
    """As in SAO, there is one step a rollout. The ratio is 1 where the policy itself sampled, and not where it has
    learned since."""
    case = Case(preset("ppo", old_logprobs="sampler"), {"minibatch_size": BATCH, "learning_rate": 2e-3})
    run_stage(
        job := job_of(
            replace(case, work=case.work | {"rollout": {"ahead": ahead}, "iterations": 3}), pipeline, tmp_path
        )
    )
    said = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert not any("importance_weight" in each or "sampler_gap" in each for each in said)
    assert ["ratio_deviation_first" in each for each in said] == (
        [True, False, False] if ahead else [True] * 3
    )
    moved = [abs(each["ratio"] - 1) > 1e-4 for each in said]
    assert moved == ([False, True, True] if ahead else [False] * 3)


def test_the_sampler_is_checked_while_the_policy_waits(pipeline: Any, tmp_path: Path) -> None:
    """A rollout begun before an update in which only the critic learned comes from the policy as it is."""
    case = Case(
        preset("ppo", old_logprobs="sampler", policy_starts_at=2),
        {"rollout": {"ahead": 1}, "iterations": 4, "learning_rate": 2e-3},
    )
    run_stage(job := job_of(case, pipeline, tmp_path))
    said = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert ["ratio_deviation_first" in each for each in said] == [False, False, True, False]


def test_a_thread_that_ends_leaves_the_autocast_cache_to_the_pass_that_trains(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads share one autocast cache. A weight cast anew between two parts gets a gradient of other bits."""
    job = pipeline.job("sft").model_copy(update={"inputs": {"init": pipeline.folder("sft")}})
    models = models_of(job, rewarded=False)
    cleared: list[str] = []
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(
        torch,
        "clear_autocast_cache",
        lambda: (cleared.append(threading.current_thread().name), clear()),
    )
    in_bfloat16 = replace(models, engine=replace(models.engine, precision="bfloat16"))
    prompts = read_prompts(pipeline.folder("prompts"), "train", models.codec).ids[:2]
    with AheadEngine(in_bfloat16.engine) as ahead:
        ahead.begin(prompts, count=1, seed=2)
        ahead.generate(prompts, count=1, seed=2)
        assert cleared == []
        ahead.generate(prompts, count=1, seed=3)
    assert cleared == ["MainThread"], "with a sampler that is not beside a pass"


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["sampling", "training"])
def test_which_is_done_first_changes_no_bit(
    slow: str, pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = job_in(tmp_path / "whole", "grpo", pipeline)
    expected = run_stage(whole)
    sample_own, update = LocalEngine.sample_own, policy_update.update

    def slowly(self: LocalEngine, *args: Any, **named: Any) -> Samples:
        time.sleep(0.5)
        return sample_own(self, *args, **named)

    def updated(*args: Any, **named: Any) -> Any:
        time.sleep(0.5)
        return update(*args, **named)

    if slow == "sampling":
        monkeypatch.setattr(LocalEngine, "sample_own", slowly)
    else:
        monkeypatch.setattr(policy_optimization, "update", updated)
    job = job_in(tmp_path / slow, "grpo", pipeline)
    assert run_stage(job) == expected
    assert contents(job.output) == contents(whole.output)
    assert curve(job) == curve(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dapo"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_killed_stage_ends_with_the_same_bytes(
    name: str, step: int, pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has the responses that were sampled ahead, since the weights that sampled them are gone."""
    same_bytes_after_a_kill(
        run_stage,
        lambda folder: job_in(folder, name, pipeline),
        tmp_path,
        step=step,
        contents=contents,
        monkeypatch=monkeypatch,
    )


def test_stopped_and_gone_on_with_it_says_the_same_of_each_step(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread counted is in the checkpoint too."""
    whole, cut = (
        job_in(tmp_path / each, "grpo", pipeline, iterations=2, validate_every=9) for each in ("whole", "cut")
    )
    taken_counts()
    expected = run_stage(whole)
    taken_counts()
    assert run_in_two_attempts(cut, monkeypatch) == expected
    assert curve(cut) == curve(whole)
    assert all("prompt_reads" in step for step in curve(whole))


def test_a_request_to_stop_does_not_wait_for_what_is_sampled_ahead(
    pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has the weights that sample in place of the responses, so the next attempt draws the same ones."""
    whole, cut = (job_in(tmp_path / each, "grpo", pipeline) for each in ("whole", "cut"))
    expected = run_stage(whole)
    sample_own, update = LocalEngine.sample_own, policy_update.update
    updates: list[int] = []
    samplers: list[threading.Thread] = []

    def endless(self: LocalEngine, *args: Any, on_token: Any, **named: Any) -> Samples:
        sampler, deadline = threading.current_thread(), time.monotonic() + 30
        if sampler.name == "sampling ahead" and sampler not in samplers:
            samplers.append(sampler)
        while sampler in samplers[1:]:  # the second one, whose responses nobody takes
            assert time.monotonic() < deadline, "it is waited for"
            on_token(0, 0)
            time.sleep(0.01)
        return sample_own(self, *args, on_token=on_token, **named)

    def updated(*args: Any, **named: Any) -> Any:
        found = update(*args, **named)
        updates.append(len(updates))
        if len(updates) == 2:
            preemption.request()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(preemption, "_signals_received", 0)
        patched.setattr(LocalEngine, "sample_own", endless)
        patched.setattr(policy_optimization, "update", updated)
        with pytest.raises(preemption.Preempted, match=f"stopped on request after step 2 of {ITERATIONS}"):
            run_stage(cut)
    assert run_stage(cut) == expected
    assert contents(cut.output) == contents(whole.output)
    assert curve(cut) == curve(whole)


def test_what_may_run_beside_the_thread_knows_it(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation may run beside it, too; test prompts are sampled when the thread has ended. On a GPU, graphs are
    captured only by a process without such a thread.
    """
    said: list[tuple[str, bool]] = []

    def noted(*args: Any, is_beside_another: bool, **named: Any) -> Samples:
        said.append((threading.current_thread().name, is_beside_another))
        return sample(*args, is_beside_another=is_beside_another, **named)

    job = job_in(tmp_path, "grpo", pipeline, iterations=2, validate_every=1)
    monkeypatch.setattr("vantage.tasks.rollout.engine.sample", noted)
    run_stage(job)
    main = [is_beside for name, is_beside in said if name == "MainThread"]
    num_test = main.count(False)
    # the first rollout, and validation before it and after both updates
    assert main == [True] * 4 + [False] * num_test
    assert num_test == 1
    assert [is_beside for name, is_beside in said if name != "MainThread"] == [True]


@pytest.mark.parametrize("ahead", [0, 1])
def test_memory_is_found_for_a_sampler_beside_the_training(
    ahead: int, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path, "grpo", pipeline, rollout={"ahead": ahead}, iterations=1, validate_every=1)
    taken: list[Any] = []
    monkeypatch.setattr(fitting_engine, "found_limits", lambda _, of, **__: taken.append(of))
    run_stage(job)
    assert [each.sampler.beside_training for each in taken] == [bool(ahead)]


def test_whoever_waits_for_the_thread_tells_how_far_it_is(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a stage whose sampling takes longer than its update would count as hanging."""
    job = pipeline.job("sft").model_copy(update={"inputs": {"init": pipeline.folder("sft")}})
    models = models_of(job, rewarded=False)
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(progress, "phase", lambda name, done, of, **_: told.append((name, done, of)))
    monkeypatch.setattr(ahead_engine, "SECONDS_BETWEEN_REPORTS", 0.01)
    sample_own, has_begun = LocalEngine.sample_own, threading.Event()

    def slowly(self: LocalEngine, *args: Any, on_token: Callable[[int, int], None], **named: Any) -> Samples:
        on_token(1, 3)
        has_begun.set()
        time.sleep(0.3)
        return sample_own(self, *args, on_token=on_token, **named)

    monkeypatch.setattr(LocalEngine, "sample_own", slowly)
    prompts = read_prompts(pipeline.folder("prompts"), "train", models.codec).ids[:2]
    with AheadEngine(models.engine) as ahead:
        ahead.begin(prompts, count=2, seed=2)
        assert has_begun.wait(60.0)
        ahead.generate(prompts, count=2, seed=2)
    assert told[0] == ("waiting for responses", 1, 4)
    assert len(told) > 3


def test_an_error_of_the_sampler_is_that_of_the_stage(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_own = LocalEngine.sample_own

    def broken(self: LocalEngine, *args: Any, **named: Any) -> Samples:
        if threading.current_thread().name == "sampling ahead":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample_own(self, *args, **named)

    monkeypatch.setattr(LocalEngine, "sample_own", broken)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        run_stage(job_in(tmp_path, "grpo", pipeline))


def test_a_stage_that_is_stopped_leaves_no_thread(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that is stopped within an update does not wait for the responses that are sampled beside it."""
    sample_own = LocalEngine.sample_own

    def endless(self: LocalEngine, *args: Any, on_token: Callable[[int, int], None], **named: Any) -> Samples:
        while threading.current_thread().name == "sampling ahead":
            on_token(0, 1)
            time.sleep(0.01)
        return sample_own(self, *args, on_token=on_token, **named)

    def stopped(*_: Any, **__: Any) -> Any:
        raise preemption.Preempted("stopped")

    monkeypatch.setattr(LocalEngine, "sample_own", endless)
    monkeypatch.setattr(policy_optimization, "update", stopped)
    with pytest.raises(preemption.Preempted):
        run_stage(job_in(tmp_path, "grpo", pipeline))
    assert "sampling ahead" not in {each.name for each in threading.enumerate()}


def value_in(folder: Path, pipeline: Any, *, ahead: int, **changes: Any) -> StageJob:
    """Return a job of value pretraining whose rollouts have two responses to each prompt."""
    folder.mkdir(exist_ok=True)
    job = pipeline.job("value", folder=folder)
    changes = {"samples_per_prompt": 2, "checkpoint_every": 1, **changes}
    return job.model_copy(
        update={"work": job.work.model_copy(update={"rollout": SampledAhead(ahead=ahead), **changes})}
    )


def test_a_critic_learns_the_same_from_what_is_sampled_ahead(
    pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixed policy is not copied, and no response is one step old. The first rollout and those that are held out are sampled
    before anything trains."""
    plain, beside = (value_in(tmp_path / str(ahead), pipeline, ahead=ahead) for ahead in (0, 1))
    expected = run_stage(plain)
    said: list[tuple[str, bool]] = []
    policies = set()

    def noted(model: nn.Module, *args: Any, is_beside_another: bool, **named: Any) -> Samples:
        said.append((threading.current_thread().name, is_beside_another))
        policies.update(each.data_ptr() for each in model.parameters())
        return sample(model, *args, is_beside_another=is_beside_another, **named)

    monkeypatch.setattr("vantage.tasks.rollout.engine.sample", noted)
    assert run_stage(beside) == expected
    assert contents(beside.output) == contents(plain.output)
    assert curve(beside) == curve(plain)
    num_weights = len({each.data_ptr() for each in models_of_policy(pipeline).parameters()})
    assert len(policies) == num_weights, "the very weights of the policy, not a copy"
    ahead = ("sampling ahead", True)
    assert said == [
        *[("MainThread", False)] * said.index(("MainThread", True)),
        ("MainThread", True),
        *[ahead] * (plain.work.iterations - 1),
        ("MainThread", False),
    ]


def models_of_policy(pipeline: Any) -> nn.Module:
    job = pipeline.job("sft").model_copy(update={"inputs": {"init": pipeline.folder("sft")}})
    return models_of(job, rewarded=False).policy.causal_lm


@pytest.mark.slow
@pytest.mark.parametrize("collected", [False, True])
def test_a_killed_critic_ends_with_the_same_bytes(
    collected: bool, pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses sampled ahead are sampled again from the same policy, also where half of each rollout was collected."""

    def job_in(folder: Path) -> StageJob:
        if not collected:
            return value_in(folder, pipeline, ahead=1)
        job = value_in(folder, pipeline, ahead=1, rollouts="collected", fresh_share=0.5)
        return job.model_copy(update={"inputs": job.inputs | {"rollouts": pipeline.folder("collected")}})

    same_bytes_after_a_kill(run_stage, job_in, tmp_path, step=2, contents=contents, monkeypatch=monkeypatch)


@pytest.mark.slow
def test_a_critic_that_is_good_enough_leaves_no_thread(pipeline: Any, tmp_path: Path) -> None:
    """Patience ends the stage while the next rollout is sampled."""
    job = value_in(tmp_path / "job", pipeline, ahead=1, learning_rate=1e-12, patience=1, iterations=9)
    run_stage(job)
    assert len(list(read(job.scratch / JOURNAL))) < 9
    assert "sampling ahead" not in {each.name for each in threading.enumerate()}
