"""Whole runs of policy optimisation equal the oracle: every number of the journal, and the weights at the end.

Each case switches on what others leave off; no two learning rates, λ, clip ranges or networks are equal. What a case is
there for is asserted of the oracle first (`happens`): a guard that never bites, or a best policy that is the last one,
would test nothing. Where another stream of random numbers breaks that, choose another seed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks import oracle_policy
from tests.tasks.oracle_networks import assert_moved_alike, language_model
from tests.tasks.oracle_policy import Outcome
from tests.tasks.unequal_inputs import collect, job_of, write_inputs
from vantage.ledger.journal import read
from vantage.schemas.recipe.rewards import MissingEos, Reward
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage
from vantage.tasks.training import checkpoints
from vantage.tasks.training.scratch import CHECKPOINTS, JOURNAL


@dataclass(frozen=True)
class Case:
    algorithm: dict[str, Any]
    work: dict[str, Any] = field(default_factory=dict)
    happens: Callable[[Outcome], bool] = lambda outcome: True
    reward: Reward | None = None
    """The reward that the stage reads; None: a reward model and a verifier."""
    seed: int = 5


def varied(outcome: Outcome, name: str) -> bool:
    """Return whether a metric is not the same in all iterations."""
    return len({metrics[name] for metrics in outcome.journal}) > 1


def doubled_and_kept(outcome: Outcome) -> bool:
    """Return whether KLPEN's controller did not do the same in every iteration."""
    coefs = [metrics["kl_penalty_coef"] for metrics in outcome.journal]
    return len({after / before for before, after in pairwise(coefs)}) > 1


def stops_short(outcome: Outcome, *, rounds: int) -> bool:
    """Return whether there were too few mixed groups even after so many rounds of four."""
    return any(
        m["sampling_rounds"] == rounds and (1 - m["uniform_group_share"]) * rounds < 1
        for m in outcome.journal
    )


def steered_freely(outcome: Outcome, *, target: float) -> bool:
    """Return whether the KL itself decided on a step of β, and not the clip of what it is off by."""
    return any(abs(metrics["kl_to_reference"] / target - 1) < 0.2 for metrics in outcome.journal[:-1])


KL_TARGET = 8.0
ACTOR_CRITIC = {
    "preset": "ppo",
    "gamma": 0.9,
    "lambda_policy": 0.7,
    "lambda_value": 0.95,
    "kl_coef": 0.1,
    "clip_range_low": 0.1,
    "clip_range_high": 0.25,
    "value_clip_range": 0.1,
}
CASES = {
    "two clips, moments of the critic, steered by k1, ptx": Case(
        {
            **ACTOR_CRITIC,
            "kl_kind": "k2",
            "reward_scaling": "normalise",
            "reward_clip": 0.8,
            "kl_target": KL_TARGET,
            "kl_horizon": 50,
            "entropy_coef": 0.02,
            "ptx_coef": 0.3,
            "dual_clip": 1.5,
            "positive_nll_coef": 0.2,
            "positive_verifier": "last_digit",
        },
        {"schedule": "linear", "warmup_steps": 3, "weight_decay": 0.1, "ptx": "demonstrations"},
        happens=lambda o: steered_freely(o, target=KL_TARGET) and 0 < o.best_iteration < 3,
        seed=1,
    ),
    "trust region and a penalty on KL(old‖new)": Case(
        {
            **ACTOR_CRITIC,
            "clip_range_low": None,
            "clip_range_high": None,
            "value_clip_range": None,
            "kl_penalty_coef": 0.5,
            "kl_penalty_target": 0.25,
            "trust_region_kl": 0.3,
            "trust_region_halvings": 2,
        },
        {"epochs": 3, "learning_rate": 0.01},
        happens=lambda o: (
            o.best_iteration > 0
            and doubled_and_kept(o)
            and o.undone_because == {"too far", "worse", "given up"}
        ),
        seed=8,
    ),
    "epochs that end where the policy has moved too far": Case(
        {**ACTOR_CRITIC, "epoch_kl_target": 0.15},
        {"epochs": 3, "learning_rate": 0.01},
        happens=lambda o: 0 < o.epochs_ended < 9,
        seed=8,
    ),
    "shared trunk, a penalty by k1, advantages of a minibatch clipped": Case(
        {
            **ACTOR_CRITIC,
            "shared_trunk": True,
            "value_coef": 0.3,
            "whiten_advantages": False,
            "normalise_advantages": True,
            "advantage_clip": 0.7,
            "kl_kind": "k3",
            "kl_loss_coef": 0.2,
            "kl_loss_kind": "abs",
            "kl_penalty_coef": 0.4,
            "kl_penalty_kind": "k1",
            "reward_scaling": "scale",
            "positive_nll_coef": 0.1,
            "positive_threshold": 0.5,
            "aggregation": "sequence",
            "overlong_buffer": 0.5,
        },
        {"critic": None},
        seed=6,
    ),
    "three steps ahead, responses that were cut off go on, n-step targets": Case(
        {
            **ACTOR_CRITIC,
            "lambda_value": 1.0,
            "gae_horizon": 3,
            "bootstrap_truncated": True,
            "overlong_filter": True,
        },
        happens=lambda o: any(0 < metrics["truncated_share"] < 1 for metrics in o.journal),
    ),
    "shared trunk, responses that were cut off go on": Case(
        {**ACTOR_CRITIC, "shared_trunk": True, "bootstrap_truncated": True, "value_clip_range": None},
        {"critic": None},
        happens=lambda o: any(0 < metrics["truncated_share"] < 1 for metrics in o.journal),
        seed=6,
    ),
    "a critic that counts only where it explains something, and comes back late": Case(
        {
            **ACTOR_CRITIC,
            "critic_ev_threshold": -0.5,
            "critic_ev_hysteresis": 0.2,
            "whiten_advantages": False,
            "bootstrap_truncated": True,
        },
        {"iterations": 5},
        happens=lambda o: varied(o, "critic_weight"),
    ),
    "a critic that counts in part": Case(
        {**ACTOR_CRITIC, "critic_blend": True, "whiten_advantages": False, "bootstrap_truncated": True},
        {"iterations": 5},
        happens=lambda o: any(0 < metrics["critic_weight"] < 1 for metrics in o.journal),
    ),
    "a masked ratio; the policy waits, and half of the critic is frozen": Case(
        {
            **ACTOR_CRITIC,
            "ratio_mask": True,
            "clip_range_low": 0.1,
            "clip_range_high": 0.3,
            "freeze_critic": "attention",
            "policy_starts_at": 1,
            "kl_target": KL_TARGET,
            "kl_horizon": 50,
            "kl_penalty_coef": 0.4,
            "kl_penalty_target": 0.25,
        },
        {"iterations": 4, "weight_decay": 0.1},
        happens=lambda o: (
            "policy_loss" not in o.journal[0]
            and "policy_loss" in o.journal[1]
            and any(abs(metrics.get("ratio", 1) - 1) > 0.01 for metrics in o.journal)
        ),
    ),
    "the critic first, three steps for one, and advantages by what it has learned": Case(
        {
            **ACTOR_CRITIC,
            "critic_first": True,
            "critic_steps": 3,
            "policy_starts_at": 1,
            "bootstrap_truncated": True,
            "old_logprobs": "sampler",
            "critic_blend": True,
        },
        {"iterations": 5},
        happens=lambda o: any(0 < metrics["critic_weight"] < 1 for metrics in o.journal[1:]),
    ),
    "two steps of the critic beside one of the policy": Case(
        {**ACTOR_CRITIC, "critic_steps": 2, "old_logprobs": "sampler", "kl_kind": "full"},
        {"schedule": "linear"},
    ),
    "a masked ratio that learns by its weight too": Case(
        {**ACTOR_CRITIC, "ratio_mask": True, "ratio_mask_gradient": True, "clip_range_high": None},
    ),
    "fresh critic, λ by length, decoupled": Case(
        {
            **ACTOR_CRITIC,
            "whiten_advantages": False,
            "lambda_value": 1.0,
            "length_adaptive_alpha": 0.8,
            "kl_kind": "full",
            "overlong_filter": True,
            "samples_per_prompt": 2,
        },
        {"critic": None, "fresh_critic": "fresh", "schedule": "cosine"},
    ),
    "a frozen critic that explains some of it, steered by its explained variance": Case(
        {
            **ACTOR_CRITIC,
            "value_clip_range": None,
            "freeze_critic": "all",
            "critic_blend": True,
            "whiten_advantages": False,
            "bootstrap_truncated": True,
        },
        {"critic_learning_rate": None, "iterations": 4},
        happens=lambda o: "value_loss" not in o.journal[0] and varied(o, "explained_variance"),
    ),
    "quantiles, of which few are far off": Case(
        {
            **ACTOR_CRITIC,
            "value_clip_range": None,
            "critic_head": {"quantiles": 5, "huber": 0.3},
            "bootstrap_truncated": True,
            "critic_steps": 2,
        },
        {"critic": None, "fresh_critic": "fresh", "iterations": 4},
    ),
    "an ensemble whose agreement silences tokens, after they are normalised": Case(
        {
            **ACTOR_CRITIC,
            "value_clip_range": None,
            "critic_head": {"ensemble": 3},
            "mask_agreed_share": 0.3,  # at 0.4 the cut is between states that are equal but for rounding
            "whiten_advantages": False,
            "normalise_advantages": True,
            "bootstrap_truncated": True,
            "overlong_filter": True,
        },
        {"critic": None, "fresh_critic": "fresh", "iterations": 4},
        happens=lambda o: varied(o, "critic_disagreement"),
    ),
    "groups, the uniform ones dropped; exact KL in the loss": Case(
        {
            "preset": "dapo",
            "clip_range_low": 0.1,
            "clip_range_high": 0.3,
            "overlong_buffer": 0.6,
            "overlong_filter": True,
            "kl_coef": 0.05,
            "kl_loss_coef": 0.3,
            "kl_loss_kind": "full",
            "samples_per_prompt": 3,
            "max_sampling_rounds": 3,
            "dual_clip": 1.2,
        },
        {"critic": None, "validate_every": 2},
        happens=lambda o: varied(o, "sampling_rounds") and stops_short(o, rounds=3),
        reward=Reward(
            terms=(VerifierTerm(verifier="last_digit", wrong=-0.5),), missing_eos=MissingEos(subtract=0.4)
        ),
        seed=9,
    ),
    "greedy baseline, scaled": Case(
        {
            "preset": "remax",
            "gamma": 0.9,
            "reward_scaling": "normalise",
            "reward_clip": 0.9,
            "aggregation": "constant",
        },
        {"critic": None, "epochs": 1, "minibatch_size": 12},
    ),
    "one against the others": Case(
        {"preset": "rloo", "samples_per_prompt": 4, "kl_coef": 0.2, "kl_kind": "abs"},
        {"critic": None, "epochs": 1, "minibatch_size": 12},
    ),
    "against the group's mean, k3 in the loss": Case(
        {
            "preset": "dr_grpo",
            "samples_per_prompt": 4,
            "whiten_advantages": True,
            "kl_loss_coef": 0.3,
            "kl_loss_kind": "k3",
        },
        {"critic": None},
    ),
    "against the reference's mean, scaled and shaped": Case(
        {
            "preset": "pvpo",
            "samples_per_prompt": 3,
            "kl_coef": 0.1,
            "kl_kind": "k2",
            "reward_scaling": "normalise",
            "reward_clip": 0.9,
            "overlong_buffer": 0.6,
        },
        {"critic": None, "rollouts": "collected"},
        happens=lambda o: varied(o, "baseline_mean"),
    ),
    "against the optimal value": Case(
        {"preset": "a_star_po", "kl_coef": 0.2, "optimal_value_beta": 0.3},
        {"critic": None, "rollouts": "collected", "epochs": 1, "minibatch_size": 12},
    ),
    "against a tracked mean": Case(
        {
            "preset": "spo",
            "samples_per_prompt": 2,
            "kl_coef": 0.1,
            "tracker_kl_half_life": 0.4,
            "tracker_memory_low": 0.3,
            "tracker_memory_high": 0.9,
        },
        {"critic": None, "rollouts": "collected", "iterations": 9, "checkpoint_every": 9},
        happens=lambda o: any(0.3 < memory < 0.9 for memory in o.memories) and 0.3 in o.memories,
    ),
    "returns to go": Case(
        {
            "preset": "reinforce_pp",
            "gamma": 0.8,
            "kl_coef": 0.1,
            "kl_loss_coef": 0.2,
            "kl_loss_kind": "k2",
            "overlong_filter": True,
        },
        {"critic": None},
    ),
}
WORK = {
    "kind": "policy_optimization",
    "init": "init",
    "reference": "reference",
    "critic": "critic",
    "reward": "main",
    "prompts": "prompts",
    "iterations": 3,
    "batch_size": 12,
    "minibatch_size": 6,
    "microbatch_size": 4,
    "epochs": 2,
    "learning_rate": 0.02,
    "critic_learning_rate": 0.007,
    "max_grad_norm": 0.5,
    "validate_every": 1,
    "validation_samples": 18,
    "test_samples": 13,
    "checkpoint_every": 3,
}
INPUTS = {
    "init": "init",
    "reference": "reference",
    "critic": "critic",
    "fresh_critic": "fresh",
    "prompts": "prompts",
    "ptx": "demonstrations",
    "reward.main.0": "reward",
    "reward.main.1": "last_digit",
    "positive_verifier": "last_digit",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("inputs")
    folders = write_inputs(root)
    return folders | {"collected": collect(root / "collecting", folders, policy="reference")}


def job_for(case: Case, folders: dict[str, Path], folder: Path) -> StageJob[Any]:
    work = PolicyOptimization.model_validate({**WORK, "algorithm": case.algorithm, **case.work})
    critic_roles = {"critic", "fresh_critic"} - {n for n in ("critic", "fresh_critic") if getattr(work, n)}
    inputs = {role: folders[name] for role, name in INPUTS.items() if role not in critic_roles}
    if work.rollouts is not None:
        inputs["rollouts"] = folders[work.rollouts]
    if case.reward is None:
        return job_of(work, folder, inputs, seed=case.seed)
    inputs["reward.main.0"] = inputs.pop("reward.main.1")
    return job_of(work, folder, inputs, seed=case.seed, rewards={"main": case.reward})


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_what_the_oracle_says(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    case = CASES[name]
    job = job_for(case, folders, tmp_path)
    outcome = oracle_policy.run(job)
    assert case.happens(outcome), [outcome.best_iteration, *outcome.journal]
    result = run_stage(job)

    journal = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert len(journal) == len(outcome.journal)
    for number, (told, expected) in enumerate(zip(journal, outcome.journal, strict=True)):
        assert ("validation_score" in told) == ("validation_score" in expected)
        for metric, value in expected.items():
            assert told[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), (number, metric)

    last = last_checkpoint(job, outcome.last)
    for network, after in outcome.last.items():
        assert_moved_alike(weights_of(last, network), after, outcome.first[network])
    if work_of(job).algorithm.advantage == "tracked_mean":
        assert sorted(weights_of(last, "baselines")["means"].tolist()) == pytest.approx(
            sorted(value for value, _ in outcome.tracked.values()), rel=1e-3, abs=1e-5
        )
        assert sorted(weights_of(last, "baselines")["weights"].tolist()) == pytest.approx(
            sorted(weight for _, weight in outcome.tracked.values()), rel=1e-3
        )
    for coef, value in outcome.steered.items():
        assert last.state["stage"][coef] == pytest.approx(value, rel=1e-3), coef

    measured = {"best_iteration": outcome.best_iteration, **outcome.measured}
    for metric, value in measured.items():
        assert result.metrics[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
    before = language_model(folders["init"]).state_dict()
    assert_moved_alike(load_file(job.output / "model.safetensors"), outcome.weights, before)


def work_of(job: StageJob) -> PolicyOptimization:
    assert isinstance(job.work, PolicyOptimization)
    return job.work


def last_checkpoint(job: StageJob, networks: Iterable[str]) -> checkpoints.Loaded:
    """Return everything that changed, as the last checkpoint has it."""
    found = checkpoints.latest(job.scratch / CHECKPOINTS)
    assert found is not None
    trained = {f"{network}.{part}" for network in networks for part in ("weights", "optimizer")}
    if work_of(job).algorithm.advantage == "tracked_mean":
        trained.add("baselines.weights")  # no optimiser changes these
    return checkpoints.load(found, required=trained | {"stage", "stopped", "journal_offset", "best"})


def weights_of(loaded: checkpoints.Loaded, network: str) -> dict[str, torch.Tensor]:
    """Return the weights of one network."""
    prefix = f"{network}.weights/"
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in loaded.tensors.items()
        if name.startswith(prefix)
    }
