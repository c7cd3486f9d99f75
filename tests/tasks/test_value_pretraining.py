"""The critic is measured on prompts that it was not trained on, against returns worked out apart from it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tasks.small_models import load, models_of
from vantage.algorithms.rewards import RunningMoments
from vantage.ledger.journal import read
from vantage.models.heads import load_critic, load_scalar, value_from_policy
from vantage.schemas.recipe.algorithm import Returns
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.verdicts import check_gate
from vantage.tasks import value_pretraining
from vantage.tasks.data.examples import read_prompts
from vantage.tasks.data.rows import read_rows
from vantage.tasks.rollout.response_source import load_source
from vantage.tasks.rollout.returns import Returned, measured_responses
from vantage.tasks.rollout.reward_moments import read_moments
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import sample_and_score, shape
from vantage.tasks.rollout.value_measures import diagnose, headline_metrics
from vantage.tasks.stages import run_stage
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.seeds import derive_seed
from vantage.tasks.updates.value_regression import accumulate_value_loss
from vantage.tasks.value_pretraining import Validation, ValueState


@pytest.fixture(scope="module")
def setting(pipeline: Any) -> tuple[Any, RolloutModels, Returned]:
    job = pipeline.job("value")
    models = models_of(job, role="policy", reference=job.inputs["policy"])
    return job, models, measured_responses(load_source(job, models), RunningMoments(), "test")


@pytest.mark.parametrize(
    ("split", "asked", "number"), [("validation", 3, 16), ("test", 3, 3), ("test", None, 16)]
)
def test_held_out_prompts_are_those_of_the_split(
    setting: tuple[Any, RolloutModels, Returned], split: str, asked: int | None, number: int
) -> None:
    job, models, _ = setting
    asking = job.model_copy(update={"work": job.work.model_copy(update={"test_samples": asked})})
    held_out = measured_responses(load_source(asking, models), RunningMoments(), split)
    assert set(held_out.rollout.sampled.prompts) <= {
        row["prompt"] for row in read_rows(job.inputs["prompts"], split)
    }
    assert len(held_out.rollout.sampled.prompts) == number


def test_returns_are_what_is_still_to_come(setting: tuple[Any, RolloutModels, Returned]) -> None:
    _, _, held_out = setting
    for row, length in enumerate(held_out.rollout.sequences.lengths.tolist()):
        rewards = held_out.rollout.rewards[row, :length].double().tolist()
        by_hand = [sum(rewards[start:]) for start in range(length)]
        assert held_out.returns[row, :length].tolist() == pytest.approx(by_hand, abs=1e-4)


def test_held_out_responses_are_the_same_every_time(setting: tuple[Any, RolloutModels, Returned]) -> None:
    job, models, held_out = setting
    again = measured_responses(load_source(job, models), RunningMoments(), "test")
    assert again.rollout.sampled.responses == held_out.rollout.sampled.responses
    assert torch.equal(again.returns, held_out.returns)


def test_a_random_critic_does_not_pass_the_gate(setting: tuple[Any, RolloutModels, Returned]) -> None:
    job, models, held_out = setting
    measured = diagnose(value_from_policy(job.inputs["policy"], seed=1), held_out, models)
    verdict = check_gate(Gate(metric="explained_variance", at_least=0.3), headline_metrics(measured))
    assert not verdict.passed
    assert verdict.evidence["return_variance"] > 0
    assert {"value_bias", "value_mse", "constant_mse"} <= verdict.evidence.keys()


def test_returns_that_do_not_vary_leave_explained_variance_undefined_and_the_gate_closed(
    setting: tuple[Any, RolloutModels, Returned],
) -> None:
    job, models, held_out = setting
    constant = Returned(rollout=held_out.rollout, returns=torch.ones_like(held_out.returns))
    metrics = headline_metrics(diagnose(load_critic(job.inputs["init"], seed=0), constant, models))
    assert metrics["explained_variance"] is None
    assert not check_gate(Gate(metric="explained_variance", at_least=-9.0), metrics).passed


def test_a_critic_from_the_reward_model_starts_as_its_score(
    setting: tuple[Any, RolloutModels, Returned],
) -> None:
    job, _, held_out = setting
    sequences = held_out.rollout.sequences
    reward, critic = load_scalar(job.inputs["init"]), load_critic(job.inputs["init"], seed=0)
    positions = sequences.response_positions
    with torch.no_grad():
        as_reward = reward(sequences, positions)
        as_critic = critic(sequences, positions)
    torch.testing.assert_close(as_critic, as_reward)


def test_micro_batches_leave_the_gradient_unchanged(setting: tuple[Any, RolloutModels, Returned]) -> None:
    job, _, held_out = setting
    gradients, losses = [], []
    for size in (None, 3):
        critic = load_critic(job.inputs["init"], seed=0)
        work = job.work.model_copy(update={"microbatch_size": size})
        rows = torch.arange(len(held_out.rollout.sequences))
        losses.append(accumulate_value_loss(critic, held_out.rollout, held_out.returns, rows, work))
        gradients.append(torch.cat([p.grad.flatten() for p in critic.parameters()]))
    scale = gradients[0].abs().max()
    torch.testing.assert_close(gradients[1] / scale, gradients[0] / scale, atol=2e-5, rtol=0)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_loss_is_half_the_mean_squared_error_over_tokens(
    setting: tuple[Any, RolloutModels, Returned],
) -> None:
    job, models, held_out = setting
    critic = load_critic(job.inputs["init"], seed=0)
    rows = torch.arange(len(held_out.rollout.sequences))
    loss = accumulate_value_loss(critic, held_out.rollout, held_out.returns, rows, job.work)
    measured = diagnose(critic, held_out, models)
    assert loss["value_loss"] == pytest.approx(0.5 * measured.mse, rel=1e-4)
    assert loss["value_bias"] == pytest.approx(measured.bias, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_the_critic_that_is_kept_is_the_best_that_was_measured(pipeline: Any, tmp_path: Any) -> None:
    job = pipeline.job("value", folder=tmp_path)
    result = run_stage(job)
    measured = [
        entry.metrics["validation_explained_variance"]
        for entry in read(job.scratch / JOURNAL)
        if "validation_explained_variance" in entry.metrics
    ]
    best = result.metrics["validation_explained_variance"]
    assert best is not None
    assert best >= max(measured) - 1e-9


def test_patience_counts_from_the_last_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explained variance rises, falls, rises and is lower twice: 0, 1, 0, 1 and 2 measurements in a row had no gain."""
    found = iter([0.1, 0.05, 0.3, 0.2, 0.25])
    monkeypatch.setattr(
        value_pretraining, "diagnose", lambda *_: SimpleNamespace(explained_variance=next(found))
    )
    attempt: Any = SimpleNamespace(state=ValueState(), best={})
    critic: Any = torch.nn.Linear(1, 1)
    validation = Validation(critic, None, held_out=Any, models=Any)  # type: ignore[arg-type]
    without_gain = []
    for iteration in range(5):
        validation.keep_if_best(attempt, iteration=iteration)
        without_gain.append(attempt.state.without_gain)
    assert without_gain == [0, 1, 0, 1, 2]
    assert (attempt.state.best, attempt.state.best_iteration) == (0.3, 2)


@pytest.mark.slow
def test_the_gate_judges_responses_to_prompts_that_chose_nothing(pipeline: Any, tmp_path: Path) -> None:
    """The headline is that of the critic in the artifact, on test prompts, by the definition in float64."""
    job = pipeline.job("value", folder=tmp_path, test_samples=12)
    result = run_stage(job)
    models = models_of(job, role="policy", reference=job.inputs["policy"])
    test_prompts = read_prompts(job.inputs["prompts"], "test", models.codec)
    seed = derive_seed(derive_seed(job.seed, "value_pretraining"), "test sampling")
    scored = sample_and_score(
        models, test_prompts, [index % len(test_prompts) for index in range(12)], seed=seed
    )
    rewards = shape(models, scored, returns=job.work.returns).rewards.double()
    sequences = scored.sampled.sequences
    mask = sequences.response_mask
    returns = torch.stack([rewards[:, start:].sum(dim=1) for start in range(rewards.shape[1])], dim=1)
    critic = load_critic(job.output, seed=0)
    with torch.no_grad():
        predicted = critic(sequences, sequences.response_positions).double()
    error, target = (returns - predicted)[mask].numpy(), returns[mask].numpy()
    assert result.metrics["explained_variance"] == pytest.approx(1 - error.var() / target.var(), abs=1e-4)
    assert result.metrics["explained_variance"] != result.metrics["validation_explained_variance"]


def test_kl_is_part_of_the_return(setting: tuple[Any, RolloutModels, Returned], pipeline: Any) -> None:
    """With a reference that is not the policy, the penalty lowers or raises the reward of each token."""
    job, models, _ = setting
    with_other = replace(models, reference=load(pipeline.folder("model")))
    prompts = read_prompts(job.inputs["prompts"], "validation", models.codec)
    scored = sample_and_score(with_other, prompts, [0, 1, 2], seed=3)
    rollout = shape(with_other, scored, returns=Returns(kl_coef=0.5))
    mask = rollout.sequences.response_mask
    expected = rollout.scores.total - 0.5 * (rollout.kl * mask).sum(dim=1)
    torch.testing.assert_close(rollout.rewards.sum(dim=1), expected, atol=1e-4, rtol=1e-5)
    assert rollout.kl[mask].abs().max() > 0.1


def test_scaled_returns_are_scaled_by_moments_that_stay_and_are_handed_over(
    pipeline: Any, tmp_path: Any
) -> None:
    """The held-out returns end in (score − μ)/σ, clipped, of the moments that the artifact holds.

    They have no KL term, so that the stage reads no reference.
    """
    returns = Returns(reward_scaling="normalise", reward_clip=0.8)
    job = pipeline.job("value", folder=tmp_path, returns=returns, iterations=1)
    inputs = {role: folder for role, folder in job.inputs.items() if role != "reference"}
    run_stage(job.model_copy(update={"inputs": inputs}))
    moments = read_moments(job.output)
    assert moments.count == job.work.batch_size
    models = models_of(job, role="policy")
    held_out = measured_responses(load_source(job, models), moments, "validation")
    scores = held_out.rollout.scores.total.double()
    expected = ((scores - moments.mean) / moments.std).clamp(-0.8, 0.8)
    torch.testing.assert_close(held_out.returns[:, 0].double(), expected, atol=1e-5, rtol=1e-5)
    assert (expected.abs() == 0.8).any()
    assert read_moments(pipeline.folder("value")) == RunningMoments()
