"""Monitors of a policy stage measure, beside its score, demonstrations that it forgets, and scores of the reward's data."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from transformers import AutoModelForCausalLM

from tests.support.slow import slow
from tests.tasks.kills import killed_in
from vantage.ledger.journal import read
from vantage.models.heads import load_scalar, scores
from vantage.models.sequences import collate
from vantage.schemas.metric_names import (
    INITIAL_PERCENTILES,
    OF_MACHINE,
    REWARD_DATA_PERCENTILES,
    SCORE_PERCENTILES,
    VALIDATION_PERCENTILES,
)
from vantage.schemas.recipe.rewards import Judge, Reward
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm
from vantage.schemas.recipe.watch import Watch
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import codec_of, read_completions
from vantage.tasks.rollout import monitors
from vantage.tasks.stages import run_stage
from vantage.tasks.training.progress import read_progress
from vantage.tasks.training.scratch import JOURNAL, PROGRESS

Contents = Callable[[Path], dict[str, bytes]]
DATA = ("demonstrations", "preferences")


def monitored(pipeline: Any, *roles: str, **changes: Any) -> StageJob:
    """Return the policy stage, which reads these datasets too."""
    job: StageJob = pipeline.job("policy", **{role: role for role in roles}, **changes)
    inputs = job.inputs | {role: pipeline.folder(role) for role in roles}
    return job.model_copy(update={"inputs": inputs, "digests": job.digests | pipeline.digests(inputs)})


def curves_of(job: StageJob) -> list[dict[str, float]]:
    """Return what each validation reported."""
    return [entry.metrics for entry in read(job.scratch / JOURNAL) if "validation_score" in entry.metrics]


def nll_by_transformers(folder: Path, job: StageJob, count: int) -> float:
    """Return mean loss per token of the first validation demonstrations, in float64, row by row and without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    examples = read_completions(
        job.inputs["demonstrations"], "validation", ["response"], codec_of(job, "init")
    )
    total, tokens = 0.0, 0
    for prompt, response in list(zip(examples.prompt_ids, examples.response_ids["response"], strict=True))[
        :count
    ]:
        ids = torch.tensor([[*prompt, *response]])
        labels = torch.tensor([[-100] * len(prompt) + list(response)])
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels).loss.item() * len(response)
        tokens += len(response)
    return total / tokens


def test_the_nll_of_demonstrations_is_transformers_loss(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are those of the policy when it is measured, and of the reference."""

    def saved(self: Any, policy: Any, scores: Any, measure: Any = monitors.Monitors.measure) -> Any:
        policy.causal_lm.save_pretrained(tmp_path)
        return measure(self, policy, scores)

    monkeypatch.setattr(monitors.Monitors, "measure", saved)
    job = monitored(pipeline, "demonstrations", validate_every=4, learning_rate=3e-3)
    run_stage(job)
    [curve] = curves_of(job)
    expected, reference = (
        nll_by_transformers(folder, job, count=16) for folder in (tmp_path, pipeline.folder("sft"))
    )
    assert curve["demonstration_nll"] == pytest.approx(expected, abs=2e-5)
    assert curve["demonstration_nll_rise"] == pytest.approx(expected - reference, abs=4e-5)
    assert abs(expected - reference) > 1e-3, "the policy has moved"


def test_no_more_rows_are_measured_than_responses_are_sampled(pipeline: Any) -> None:
    job = monitored(
        pipeline, "demonstrations", validation_samples=3, validate_every=1, iterations=1, learning_rate=1e-12
    )
    run_stage(job)
    [curve] = curves_of(job)
    assert curve["demonstration_nll"] == pytest.approx(
        nll_by_transformers(pipeline.folder("sft"), job, count=3), abs=2e-5
    )
    assert curve["demonstration_nll_rise"] == pytest.approx(0.0, abs=1e-6)


def scores_of_pairs(pipeline: Any, job: StageJob, count: int) -> list[float]:
    """Return the reward model's scores of the first pairs of both splits, response by response."""
    model = load_scalar(pipeline.folder("reward"))
    found = []
    for split in ("train", "validation"):
        pairs = read_completions(
            job.inputs["preferences"], split, ["chosen", "rejected"], codec_of(job, "init")
        )
        for side in ("chosen", "rejected"):
            for row in range(min(count, len(pairs))):
                batch = collate([pairs.prompt_ids[row]], [pairs.response_ids[side][row]], pad_token_id=0)
                with torch.no_grad():
                    found.append(scores(model, batch).item())
    return found


def share_preferred(found: Any) -> float:
    """Return the share of validation pairs whose chosen response scores higher. The first 16 pairs are of training."""
    chosen, rejected = np.split(found[2 * 16 :], 2)
    return float(np.mean(chosen > rejected) + 0.5 * np.mean(chosen == rejected))


def test_scores_are_compared_with_those_of_the_reward_models_own_data(pipeline: Any) -> None:
    job = monitored(pipeline, "preferences", validate_every=2)
    run_stage(job)
    expected = np.array(scores_of_pairs(pipeline, job, count=16))
    assert len(expected) == 2 * (16 + min(16, len(expected) // 2 - 16))
    quantiles = np.percentile(expected, SCORE_PERCENTILES)
    curves = curves_of(job)
    assert len(curves) == 2
    for curve in curves:
        assert [curve[name] for name in REWARD_DATA_PERCENTILES] == pytest.approx(quantiles, abs=1e-5)
        assert curve["reward_data_distance"] > 0


def test_reward_and_judge_are_measured_on_held_out_preferences(pipeline: Any) -> None:
    """The judge is the same reward model with the opposite sign, so it prefers the other response of each pair."""
    watch = Watch(judge=Judge(reward="opposite"), every=1, on_fall="warn")
    job = monitored(pipeline, "preferences", validate_every=4, watch=watch)
    opposite = Reward(terms=(ModelTerm(model="reward", weight=-1.0),))
    inputs = job.inputs | {"reward.opposite.0": pipeline.folder("reward")}
    job = job.model_copy(
        update={
            "rewards": {**job.rewards, "opposite": opposite},
            "inputs": inputs,
            "digests": job.digests | pipeline.digests(inputs),
        }
    )
    run_stage(job)
    found = np.array(scores_of_pairs(pipeline, job, count=16))
    share, pairs = share_preferred(found), (len(found) - 2 * 16) // 2
    assert 0 < share != 0.5
    curve = curves_of(job)[-1]
    assert curve["reward_preference_accuracy"] == pytest.approx(share)
    assert curve["watch_preference_accuracy"] == pytest.approx(1 - share)
    assert curve["watch_initial_pair_accuracy"] < 0.5
    progress = read_progress(job.scratch / PROGRESS)
    assert progress is not None
    [notice] = progress.notices
    assert f"the reward prefers the chosen response in {share:.0%} of {pairs} pairs" in notice
    assert f"the judge prefers the chosen response in {1 - share:.0%} of {pairs} pairs" in notice


def test_the_distance_is_that_of_the_models_scores_alone(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier's term and the missing end are no scores of the model; percentiles of both kinds are not comparable."""
    seen = []

    def looked(self: Any, by_term: Any, measure: Any = monitors.RewardData.measure) -> dict[str, float]:
        found: dict[str, float] = measure(self, by_term)
        seen.append((2.0 * by_term["reward"].double(), self.scores.double(), found))
        return found

    monkeypatch.setattr(monitors.RewardData, "measure", looked)
    reward = Reward(
        terms=(
            ModelTerm(model="reward", weight=2.0),
            VerifierTerm(verifier="arithmetic", weight=3.0, wrong=-1.0),
        )
    )
    job = monitored(pipeline, "preferences", validate_every=4).model_copy(
        update={"rewards": {"main": reward}}
    )
    run_stage(job)
    [(model_scores, of_data, found)] = seen
    expected = np.array(scores_of_pairs(pipeline, job, count=16))
    np.testing.assert_allclose(np.sort(of_data.numpy()), np.sort(2.0 * expected), atol=1e-5)
    distance = wasserstein_distance(model_scores.numpy(), 2.0 * expected) / np.std(2.0 * expected)
    assert found == {
        "reward_data_distance": pytest.approx(distance, rel=1e-4),
        "reward_preference_accuracy": pytest.approx(share_preferred(expected)),
    }
    assert curves_of(job)[0]["reward_data_distance"] == found["reward_data_distance"]


@pytest.mark.slow
def test_what_is_measured_changes_no_bit(pipeline: Any, contents: Contents) -> None:
    plain, looking = pipeline.job("policy"), monitored(pipeline, *DATA)
    expected, found = run_stage(plain), run_stage(looking)
    assert found.metrics == expected.metrics
    assert contents(looking.output) == contents(plain.output)
    for one, other in zip(curves_of(plain), curves_of(looking), strict=True):
        added = {
            "demonstration_nll",
            "demonstration_nll_rise",
            "reward_data_distance",
            "reward_preference_accuracy",
            *REWARD_DATA_PERCENTILES,
        }
        assert other.keys() - one.keys() == added
        measured = [
            name for name in one if name not in OF_MACHINE and not name.startswith(("forward", "padding"))
        ]
        assert {name: one[name] for name in measured} == {name: other[name] for name in measured}


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [3, *slow(1)])
def test_killed_and_resumed_it_reports_the_same(
    pipeline: Any, iteration: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = (monitored(pipeline, *DATA, validate_every=1, checkpoint_every=1) for _ in range(2))
    run_stage(whole)
    with killed_in(iteration, monkeypatch):
        run_stage(cut)
    run_stage(cut)
    names = ("demonstration_nll", "demonstration_nll_rise", "reward_data_distance", *INITIAL_PERCENTILES)
    one, other = ([{name: each[name] for name in names} for each in curves_of(job)] for job in (whole, cut))
    assert one == other
    assert len(one) == 4


@pytest.mark.slow
def test_percentiles_of_the_first_policy_stay_beside_the_newest(pipeline: Any) -> None:
    """After a step that changes nothing, both percentiles are those of the first policy."""
    job = pipeline.job("policy", validate_every=2, learning_rate=1e-12)
    run_stage(job)
    for curve in curves_of(job):
        first = [curve[name] for name in INITIAL_PERCENTILES]
        assert [curve[name] for name in VALIDATION_PERCENTILES] == pytest.approx(first)
        assert first == sorted(first)
        assert not math.isnan(sum(first))
