"""Whole stages with the losses of 2025 equal an oracle in float64: several minibatches a rollout, so that ratios are off 1."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks import oracle_policy
from tests.tasks.oracle_networks import assert_moved_alike
from tests.tasks.oracle_policy import Outcome
from tests.tasks.test_policy_runs_by_oracle import Case, folders, job_for, last_checkpoint, varied, weights_of
from vantage.ledger.journal import read
from vantage.schemas.metric_names import LOSSES_OF_SWITCHES, OF_MACHINE
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.metrics import curve_metric_names
from vantage.tasks.stages import run_stage
from vantage.tasks.training import preemption
from vantage.tasks.training.scratch import JOURNAL

__all__ = ["folders"]  # used as a fixture

GROUPS = {
    "preset": "grpo",
    "samples_per_prompt": 3,
    "clip_range_low": 0.1,
    "clip_range_high": 0.3,
    "kl_loss_coef": 0.1,
}
ALONE: dict[str, Any] = {"critic": None}


def binds(metric: str) -> Any:
    """Return whether a share is neither 0 nor 1 in some iteration."""
    return lambda outcome: any(0 < metrics[metric] < 1 for metrics in outcome.journal)


def moved_off(outcome: Outcome) -> bool:
    return any(metrics["approx_kl"] > 1e-3 for metrics in outcome.journal)


CASES = {
    "the ratio of the response": Case(
        {
            **GROUPS,
            "ratio_level": "sequence",
            "clip_range_low": 0.02,
            "clip_range_high": 0.03,
            "kl_coef": 0.05,
        },
        ALONE,
        happens=moved_off,
    ),
    "the ratio of the response, of tokens with advantages of their own, dual clip": Case(
        {
            "preset": "ppo",
            "gamma": 0.9,
            "lambda_policy": 0.7,
            "kl_coef": 0.1,
            "ratio_level": "sequence",
            "clip_range_low": 0.05,
            "clip_range_high": 0.02,
            "dual_clip": 1.05,
            "overlong_filter": True,
        },
        happens=moved_off,
    ),
    "a clipped weight, open below": Case(
        {**GROUPS, "surrogate": "clipped_weight", "clip_range_low": None, "aggregation": "token"},
        ALONE,
        happens=moved_off,
        seed=7,
    ),
    "a clipped weight of the response, bounded on both sides": Case(
        {
            "preset": "reinforce_pp",
            "gamma": 0.8,
            "kl_coef": 0.1,
            "surrogate": "clipped_weight",
            "ratio_level": "sequence",
            "clip_range_low": 0.03,
            "clip_range_high": 0.06,
        },
        ALONE,
        happens=moved_off,
    ),
    "a soft gate": Case(
        {
            "preset": "ppo",
            "gamma": 0.9,
            "kl_coef": 0.1,
            "surrogate": "soft_gate",
            "soft_gate_positive": 1.5,
            "soft_gate_negative": 4.0,
        },
        happens=moved_off,
    ),
    "a soft gate of the response": Case(
        {**GROUPS, "surrogate": "soft_gate", "ratio_level": "sequence", "soft_gate_negative": 6.0},
        ALONE,
        happens=moved_off,
    ),
    "a geometric mean": Case(
        {**GROUPS, "surrogate": "geometric_mean", "kl_coef": 0.1, "overlong_filter": True},
        ALONE,
        happens=moved_off,
    ),
    "a geometric mean by length, of the reference's mean": Case(
        {
            "preset": "pvpo",
            "samples_per_prompt": 2,
            "surrogate": "geometric_mean",
            "aggregation": "token",
            "clip_range_low": 0.05,
        },
        {**ALONE, "rollouts": "collected"},
        happens=moved_off,
    ),
    "clip-cov, advantages of a minibatch": Case(
        {
            "preset": "ppo",
            "gamma": 0.9,
            "lambda_policy": 0.7,
            "kl_coef": 0.1,
            "clip_range_low": 0.1,
            "clip_range_high": 0.2,
            "normalise_advantages": True,
            "overlong_filter": True,
            "covariance": "clip",
            "covariance_share": 0.2,
            "covariance_low": 0.05,
            "covariance_high": 3.0,
        },
        happens=binds("covariance_fraction"),
    ),
    "clip-cov, an ensemble whose agreement silences tokens": Case(
        {
            "preset": "ppo",
            "kl_coef": 0.05,
            "clip_range_low": None,
            "clip_range_high": 0.3,
            "normalise_advantages": True,
            "value_clip_range": None,
            "critic_head": {"ensemble": 3},
            "mask_agreed_share": 0.3,
            "covariance": "clip",
            "covariance_share": 0.2,
            "covariance_low": 0.05,
            "covariance_high": 3.0,
        },
        {**ALONE, "fresh_critic": "fresh"},
        happens=binds("covariance_fraction"),
    ),
    "kl-cov": Case(
        {
            **GROUPS,
            "clip_range_low": None,
            "clip_range_high": None,
            "covariance": "kl",
            "covariance_share": 0.25,
            "covariance_kl_coef": 0.7,
            "aggregation": "token",
        },
        ALONE,
        happens=binds("covariance_fraction"),
    ),
    "an unbiased gradient of k3": Case(
        {**GROUPS, "kl_loss_coef": 0.4, "kl_loss_kind": "k3", "kl_loss_gradient": "unbiased"}, ALONE
    ),
    "an unbiased gradient of k1": Case(
        {**GROUPS, "kl_loss_coef": 0.4, "kl_loss_kind": "k1", "kl_loss_gradient": "unbiased"}, ALONE
    ),
    "each token is charged its own KL and that of later ones": Case(
        {
            "preset": "reinforce_pp_baseline",
            "samples_per_prompt": 3,
            "kl_loss_coef": 0.0,
            "kl_coef": 0.3,
            "kl_kind": "k2",
            "kl_credit": "token",
            "reward_scaling": "normalise",
            "reward_clip": 0.9,
            "kl_target": 8.0,
            "kl_horizon": 50,
        },
        ALONE,
        happens=lambda o: varied(o, "kl_coef"),
    ),
    "an entropy coefficient that adapts": Case(
        {
            **GROUPS,
            "entropy_coef": 0.05,
            "entropy_target": 1.45,
            "entropy_step": 0.03,
            "entropy_coef_max": 0.06,
        },
        {**ALONE, "iterations": 5, "checkpoint_every": 5},
        happens=lambda o: {0.0, 0.06} < {metrics["entropy_coef"] for metrics in o.journal},
    ),
}

NEW_CURVES = {
    "a clipped weight, open below": {"weight_clip_fraction"},
    "a clipped weight of the response, bounded on both sides": {"weight_clip_fraction"},
    "a soft gate": {"gate_slope"},
    "a soft gate of the response": {"gate_slope"},
    "clip-cov, advantages of a minibatch": {"covariance_fraction"},
    "clip-cov, an ensemble whose agreement silences tokens": {"covariance_fraction"},
    "kl-cov": {"covariance_fraction", "covariance_kl"},
    "an entropy coefficient that adapts": {"entropy_coef"},
}
"""Case → its curves that other switches do not have."""


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_what_the_oracle_says(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    case = CASES[name]
    job = job_for(case, folders, tmp_path)
    outcome = oracle_policy.run(job)
    assert case.happens(outcome), outcome.journal
    run_stage(job)
    journal = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert len(journal) == len(outcome.journal)
    for number, (found, expected) in enumerate(zip(journal, outcome.journal, strict=True)):
        for metric, value in expected.items():
            assert found[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), (number, metric)
    reported = set().union(*journal)
    assert reported & set(LOSSES_OF_SWITCHES) == NEW_CURVES.get(name, set())
    assert reported <= curve_metric_names("policy_optimization") | {
        "score_mean_reward",
        "score_mean_last_digit",
    }
    last = last_checkpoint(job, outcome.last)
    for network, after in outcome.last.items():
        assert_moved_alike(weights_of(last, network), after, outcome.first[network])
    for coef, value in outcome.steered.items():
        assert last.state["stage"][coef] == pytest.approx(value, rel=1e-3), coef


@pytest.mark.slow
def test_a_run_that_is_stopped_and_goes_on_ends_with_the_same_bits(
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The entropy's coefficient and side are in the checkpoint, and a draw is a function of the step."""
    switches = {
        **CASES["clip-cov, advantages of a minibatch"].algorithm,
        **{"entropy_coef": 0.05, "entropy_target": 1.8, "entropy_step": 0.03, "entropy_coef_max": 0.1},
        "overlong_filter": False,
    }
    case = Case(switches, {"iterations": 4, "checkpoint_every": 1})
    whole, cut = (job_for(case, folders, tmp_path / name) for name in ("whole", "cut"))
    run_stage(whole)
    for step in (1, 2, 3):
        with monkeypatch.context() as patched:
            patched.setattr(preemption, "requested", lambda: True)
            with pytest.raises(preemption.Preempted, match=f"stopped on request after step {step} of 4"):
                run_stage(cut)
    run_stage(cut)
    curves, states, weights = zip(*(ends_of(job) for job in (whole, cut)), strict=True)
    assert curves[0] == curves[1]
    assert {0.0, 0.05} < {metrics["entropy_coef"] for metrics in curves[0]}, "below the target, and above it"
    assert states[0] == states[1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def ends_of(job: StageJob[Any]) -> tuple[list[dict[str, float]], Any, dict[str, torch.Tensor]]:
    """Return the journal, and state and tensors of the last checkpoint."""
    found = last_checkpoint(job, ("policy", "critic"))
    curves = [
        {name: value for name, value in entry.metrics.items() if name not in OF_MACHINE}
        for entry in read(job.scratch / JOURNAL)
    ]
    return curves, found.state["stage"], dict(found.tensors)
