"""Critics with several outputs, and frozen ones, go from their pretraining to a policy: measures, gates, resume, adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.kills import killed_in
from vantage.ledger.journal import read
from vantage.models.heads import load_scalar, outputs
from vantage.models.scalar_sidecar import HeadDiffers
from vantage.schemas.kinds import resolve_work
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.critic_head import CriticHead
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.verdicts import check_gate
from vantage.tasks.rollout.critic_outputs import form_metrics
from vantage.tasks.rollout.response_source import load_source
from vantage.tasks.rollout.returns import measured_responses, score_moments
from vantage.tasks.rollout.rollout_models import load_rollout_models
from vantage.tasks.stages import run_stage
from vantage.tasks.training import checkpoints
from vantage.tasks.training.networks import fixed_policy
from vantage.tasks.training.scratch import CHECKPOINTS, JOURNAL
from vantage.tasks.updates.actor_critic import load_actor_critic

CPU = torch.device("cpu")
HEADS = {"quantiles": CriticHead(quantiles=8), "ensemble": CriticHead(ensemble=2)}
METRIC = {"quantiles": "quantile_calibration_error", "ensemble": "critic_disagreement"}


def value_job(pipeline: Any, folder: Path, **changes: Any) -> StageJob:
    job: StageJob = pipeline.job("value", folder=folder, **changes)
    return job.model_copy(update={"work": resolve_work(job.work)})


def policy_job(
    pipeline: Any, folder: Path, critic: Path, switches: dict[str, Any], **changes: Any
) -> StageJob:
    job: StageJob = pipeline.job("policy", folder=folder, iterations=2, **changes)
    algorithm = Algorithm.model_validate({**job.work.algorithm.model_dump(), **switches})  # type: ignore[union-attr]
    work = job.work.model_copy(update={"algorithm": algorithm})
    return job.model_copy(update={"work": resolve_work(work), "inputs": {**job.inputs, "critic": critic}})


@pytest.fixture(scope="module")
def pretrained(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[StageJob, Any]]:
    """Return name → a critic of that form, as its stage made it."""
    found = {}
    for name, head in HEADS.items():
        job = value_job(pipeline, tmp_path_factory.mktemp(name), head=head)
        found[name] = (job, run_stage(job))
    return found


@pytest.mark.parametrize("name", HEADS)
def test_a_value_stage_measures_what_its_critic_predicts_and_a_gate_reads_it(
    name: str, pretrained: dict[str, tuple[StageJob, Any]]
) -> None:
    """The test computes the measure from the kept critic's outputs on the test responses; explained variance and
    calibration are there too.
    """
    job, result = pretrained[name]
    metrics = result.metrics
    assert METRIC[name] in metrics and set(METRIC.values()) & set(metrics) == {METRIC[name]}
    assert metrics["explained_variance"] is not None and metrics["calibration_error"] is not None
    models = load_rollout_models(
        job, job.work, fixed_policy(job, "policy", CPU), role="policy", with_reference=True
    )
    source = load_source(job, models)
    test = measured_responses(source, score_moments(source), "test")
    critic, mask = load_scalar(job.output, role="value"), test.rollout.sequences.response_mask
    with torch.no_grad():
        found = outputs(critic, test.rollout.sequences)[mask].double()
    if name == "ensemble":
        # the standard deviation of two numbers
        expected = (found[:, 0] - found[:, 1]).abs().mean().item() / 2
    else:
        expected = by_hand(found.tolist(), test.returns[mask].double().tolist())
    assert metrics[METRIC[name]] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    gate = Gate(metric=METRIC[name], at_most=expected + 0.01)
    assert check_gate(gate, metrics).passed
    assert not check_gate(Gate(metric=METRIC[name], at_most=expected - 0.01), metrics).passed
    assert form_metrics(load_scalar(pretrained["ensemble"][0].output), test, models).keys() == {
        "critic_disagreement"
    }


def by_hand(quantiles: list[list[float]], returns: list[float]) -> float:
    ordered = sorted(returns)
    distinct = sorted(set(returns))
    bounds = set()
    for tenth in range(1, 10):
        at = min(distinct.index(ordered[tenth * len(ordered) // 10]), len(distinct) - 2)
        bounds.add((distinct[at] + distinct[at + 1]) / 2)
    errors = []
    for bound in bounds:
        told = sum(q <= bound for row in quantiles for q in row) / (len(quantiles) * len(quantiles[0]))
        errors.append(abs(told - sum(g <= bound for g in returns) / len(returns)))
    return sum(errors) / len(errors)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_kill_leaves_no_trace(
    name: str,
    pipeline: Any,
    pretrained: dict[str, tuple[StageJob, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, result = pretrained[name]
    with killed_in(3, monkeypatch):
        run_stage(value_job(pipeline, tmp_path, head=HEADS[name]))
    again = value_job(pipeline, tmp_path, head=HEADS[name])
    assert run_stage(again) == result
    for file in ("model.safetensors", "head.safetensors", "scalar.json"):
        assert (again.output / file).read_bytes() == (whole.output / file).read_bytes(), file


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_the_policy_goes_on_with_the_pretrained_head(
    name: str, pipeline: Any, pretrained: dict[str, tuple[StageJob, Any]], tmp_path: Path
) -> None:
    critic = pretrained[name][0].output
    switches: dict[str, Any] = {"critic_head": HEADS[name]}
    if name == "ensemble":
        switches["mask_agreed_share"] = 0.2
    job = policy_job(pipeline, tmp_path, critic, switches)
    networks = load_actor_critic(job, CPU)
    assert networks.critic is not None
    assert torch.equal(networks.critic.head.weight, load_file(critic / "head.safetensors")["weight"])
    run_stage(job)
    curves = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert all(("critic_disagreement" in curve) == (name == "ensemble") for curve in curves)
    assert all(curve["value_loss"] > 0 for curve in curves)


def test_another_head_than_the_recipe_s_is_refused_before_anything_is_sampled(
    pipeline: Any, pretrained: dict[str, tuple[StageJob, Any]], tmp_path: Path
) -> None:
    job = policy_job(pipeline, tmp_path, pretrained["quantiles"][0].output, {})
    with pytest.raises(
        HeadDiffers, match=r"set critic_head: \{quantiles: 8\}, or pretrain a critic with head: \{\}"
    ):
        run_stage(job)
    assert not any(job.output.iterdir())


def test_a_frozen_critic_is_read_and_costs_no_optimiser(pipeline: Any, tmp_path: Path) -> None:
    """The critic has no update, no moments, and no part in a checkpoint; its explained variance is still that of the
    first rollout.
    """
    critic = pipeline.folder("value")
    frozen = policy_job(pipeline, tmp_path / "frozen", critic, {"freeze_critic": "all"})
    networks = load_actor_critic(frozen, CPU)
    assert networks.critic is not None and not networks.critic_learns
    assert networks.optimizers.keys() == networks.modules.keys() == {"policy"}
    assert not any(each.requires_grad for each in networks.critic.parameters())
    learning = policy_job(pipeline, tmp_path / "learning", critic, {})
    run_stage(frozen)
    run_stage(learning)
    of_frozen, of_learning = ([e.metrics for e in read(job.scratch / JOURNAL)] for job in (frozen, learning))
    assert of_frozen[0]["explained_variance"] == of_learning[0]["explained_variance"]
    assert all("explained_variance" in curve for curve in of_frozen)
    missing = {
        "value_loss",
        "value_bias",
        "value_mse",
        "value_clip_fraction",
        "grad_norm_critic",
        "learning_rate_critic",
    }
    assert of_learning[0].keys() - of_frozen[0].keys() == missing
    saved = checkpoints.latest(frozen.scratch / CHECKPOINTS)
    assert saved is not None
    assert not any("critic" in name for name in load_file(saved.folder / "tensors.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_adapters_carry_every_form(name: str, lora_pipeline: Any, tmp_path: Path) -> None:
    """The critic is pretrained with adapters, then trained on, then frozen beneath a policy with adapters of its own."""
    job = value_job(lora_pipeline, tmp_path / "value", head=HEADS[name], iterations=2)
    result = run_stage(job)
    assert result.base is not None and METRIC[name] in result.metrics
    assert load_file(job.output / "head.safetensors")["weight"].shape[0] == HEADS[name].outputs
    for freeze in ("none", "all"):
        changes = {} if freeze == "none" else {"critic_learning_rate": None}
        switches = {"critic_head": HEADS[name], "freeze_critic": freeze}
        policy = policy_job(lora_pipeline, tmp_path / freeze, job.output, switches, **changes)
        base = {"critic.base": policy.inputs["init.base"]}
        run_stage(policy.model_copy(update={"inputs": policy.inputs | base}))
        curves = [entry.metrics for entry in read(policy.scratch / JOURNAL)]
        assert all(("value_loss" in curve) == (freeze == "none") for curve in curves)
