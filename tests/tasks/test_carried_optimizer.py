"""A policy stage goes on with the optimiser of its critic's pretraining, in its state when the kept critic was made."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.kills import killed_in
from vantage.ledger.journal import read
from vantage.models.heads import load_critic
from vantage.schemas.kinds import resolve_work
from vantage.schemas.records.job import StageJob
from vantage.tasks import value_pretraining
from vantage.tasks.stages import run_stage
from vantage.tasks.training.carried_optimizer import NoOptimizerState, carry_over, state_of, write_state
from vantage.tasks.training.optimization import make_optimizer, take_step
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.updates.actor_critic import load_actor_critic

FILE = "optimizer.safetensors"


def value_job(pipeline: Any, folder: Path, **changes: Any) -> StageJob:
    job: StageJob = pipeline.job("value", folder=folder, keep_optimizer=True, **changes)
    return job.model_copy(update={"work": resolve_work(job.work)})


def policy_job(pipeline: Any, folder: Path, critic: Path, **changes: Any) -> StageJob:
    job: StageJob = pipeline.job("policy", folder=folder, **{"critic_optimizer": "carry", **changes})
    inputs = {**job.inputs, "critic": critic}
    return job.model_copy(update={"work": resolve_work(job.work), "inputs": inputs})


@pytest.fixture(scope="module")
def pretrained(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a critic of four iterations of two steps, with its optimiser."""
    job = value_job(pipeline, tmp_path_factory.mktemp("pretrained"))
    run_stage(job)
    return job.output


@pytest.mark.slow
def test_only_who_asks_writes_it(pipeline: Any, pretrained: Path) -> None:
    assert (pretrained / FILE).is_file()
    assert not (pipeline.folder("value") / FILE).exists()
    weights = load_file(pretrained / "model.safetensors")
    assert all(
        torch.equal(weights[name], each)
        for name, each in load_file(pipeline.folder("value") / "model.safetensors").items()
    )


def test_it_is_the_state_at_the_iteration_that_was_kept(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of four validations is made the best. An iteration has two optimiser steps, so four were taken."""
    measured = iter([0.0, 0.1, 0.9, 0.2, 0.3])
    keep = value_pretraining.keep_if_best

    def chosen(attempt: Any, module: Any, _: float, **named: Any) -> bool:
        return keep(attempt, module, next(measured), **named)

    monkeypatch.setattr(value_pretraining, "keep_if_best", chosen)
    job = value_job(pipeline, tmp_path)
    result = run_stage(job)
    assert result.metrics["best_iteration"] == 2
    state = load_file(job.output / FILE)
    assert {each.item() for name, each in state.items() if name.endswith("/step")} == {4.0}
    names = {name for name, _ in load_critic(job.output, seed=0).named_parameters()}
    assert {name.rpartition("/")[0] for name in state} == names
    assert {name.rpartition("/")[2] for name in state} == {"exp_avg", "exp_avg_sq", "step"}


@pytest.mark.slow
def test_a_kill_leaves_no_trace_in_it(
    pipeline: Any, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_in(3, monkeypatch):
        run_stage(value_job(pipeline, tmp_path))
    again = value_job(pipeline, tmp_path)
    run_stage(again)
    assert (again.output / FILE).read_bytes() == (pretrained / FILE).read_bytes()


def test_going_on_is_as_if_nothing_lay_between(pretrained: Path) -> None:
    """Four steps at once give the same bits as two steps and two more after the state was saved and read."""

    def steps(critic: torch.nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            draw = torch.Generator().manual_seed(number)
            for parameter in critic.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            take_step(optimizer, critic, learning_rate=1e-3, max_grad_norm=1.0)

    whole = load_critic(pretrained, seed=0)
    optimizer = make_optimizer(whole, weight_decay=0.1)
    steps(whole, optimizer, range(4))

    first = load_critic(pretrained, seed=0)
    before = make_optimizer(first, weight_decay=0.1)
    steps(first, before, range(2))
    folder = pretrained.parent / "between"
    folder.mkdir()
    write_state(folder, state_of(before, first))
    after = make_optimizer(first, weight_decay=0.1)
    carry_over(after, first, folder)
    steps(first, after, range(2, 4))
    for (name, one), (_, other) in zip(whole.named_parameters(), first.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_all_of_it_is_where_the_critic_is(pretrained: Path) -> None:
    """The whole state is on the critic's device. AdamW's fused kernel refuses a number of steps on another one."""
    critic = load_critic(pretrained, seed=0).to("meta")
    optimizer = make_optimizer(critic, weight_decay=0.1)
    carry_over(optimizer, critic, pretrained)
    state = [each for parameter in critic.parameters() for each in optimizer.state[parameter].values()]
    assert {each.device.type for each in state} == {"meta"}


def test_the_policy_stage_begins_with_it(pipeline: Any, pretrained: Path, tmp_path: Path) -> None:
    networks = load_actor_critic(policy_job(pipeline, tmp_path, pretrained), torch.device("cpu"))
    saved = load_file(pretrained / FILE)
    assert networks.critic is not None
    for name, parameter in networks.critic.named_parameters():
        for key, tensor in networks.optimizers["critic"].state[parameter].items():
            assert torch.equal(tensor, saved[f"{name}/{key}"])
    assert not networks.optimizers["policy"].state
    assert {group["weight_decay"] for group in networks.optimizers["critic"].param_groups} == {0.0}


def test_frozen_parts_carry_nothing(pipeline: Any, pretrained: Path, tmp_path: Path) -> None:
    job = policy_job(pipeline, tmp_path, pretrained)
    frozen = job.work.algorithm.model_copy(update={"freeze_critic": "attention"})  # type: ignore[union-attr]
    job = job.model_copy(update={"work": job.work.model_copy(update={"algorithm": frozen})})
    networks = load_actor_critic(job, torch.device("cpu"))
    assert networks.critic is not None
    for name, parameter in networks.critic.named_parameters():
        assert (parameter in networks.optimizers["critic"].state) == (".self_attn." not in name)


def test_the_critic_has_no_second_warm_up(pipeline: Any, pretrained: Path, tmp_path: Path) -> None:
    """Warm-up takes eight steps, and the iteration has four: the policy's rate still rises, the critic's does not."""
    changes = {"warmup_steps": 8, "iterations": 1, "critic_learning_rate": 3e-4}
    carried = policy_job(pipeline, tmp_path / "carried", pretrained, **changes)
    run_stage(carried)
    fresh = policy_job(pipeline, tmp_path / "fresh", pretrained, critic_optimizer="fresh", **changes)
    run_stage(fresh)
    [of_carried], [of_fresh] = ([e.metrics for e in read(job.scratch / JOURNAL)] for job in (carried, fresh))
    assert of_carried["learning_rate_critic"] == pytest.approx(3e-4)
    assert of_fresh["learning_rate_critic"] < 2.5e-4
    assert of_carried["learning_rate_policy"] == of_fresh["learning_rate_policy"] < 1e-4
    assert of_carried["value_loss"] != of_fresh["value_loss"], "the second step of the critic is another"


@pytest.mark.slow
def test_a_stage_that_goes_on_from_a_checkpoint_does_not_begin_with_it_again(
    pipeline: Any, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = policy_job(pipeline, tmp_path / "whole", pretrained)
    result = run_stage(whole)
    with killed_in(3, monkeypatch):
        run_stage(policy_job(pipeline, tmp_path / "cut", pretrained))
    cut = policy_job(pipeline, tmp_path / "cut", pretrained)
    assert run_stage(cut) == result
    assert (cut.output / "model.safetensors").read_bytes() == (
        whole.output / "model.safetensors"
    ).read_bytes()


def test_a_critic_without_it_is_refused_with_the_remedy(pipeline: Any, tmp_path: Path) -> None:
    job = policy_job(pipeline, tmp_path, pipeline.folder("value"))
    with pytest.raises(NoOptimizerState, match="keep_optimizer: true, or set critic_optimizer: fresh"):
        run_stage(job)


def test_a_critic_that_never_got_better_begins_anew(pipeline: Any, tmp_path: Path) -> None:
    critic = load_critic(pipeline.folder("value"), seed=0)
    write_state(tmp_path, {"head.weight": torch.zeros(1)})
    optimizer = make_optimizer(critic, weight_decay=0.0)
    carry_over(optimizer, critic, tmp_path)
    assert not optimizer.state
