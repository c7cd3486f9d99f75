"""Every preset runs as a stage, with two real iterations on the tiny pipeline, reports its metrics, and can be resumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from vantage.ledger.journal import read
from vantage.models.folders import load_policy
from vantage.models.heads import fresh_value_head, load_critic
from vantage.schemas.kinds import resolve_work
from vantage.schemas.metric_names import (
    ANSWERS,
    COMPILED,
    DEMONSTRATED,
    DIFFICULTY,
    ENGINE,
    ENSEMBLE,
    GRAPHS,
    IMPORTANCE,
    LOSSES_OF_SWITCHES,
    NONFINITE,
    OF_MACHINE,
    OF_SERVERS,
    REWARD_DATA,
    TERM_QUANTILES,
    UNCOMPILED,
    VALIDATION_TERMS,
    WATCHED,
)
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.presets import PresetName
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.metrics import curve_metric_names, headline_metric_names
from vantage.tasks.stages import run_stage
from vantage.tasks.training import checkpoints, preemption
from vantage.tasks.training.scratch import CHECKPOINTS, JOURNAL
from vantage.tasks.training.seeds import derive_seed, stage_seed
from vantage.tasks.updates.actor_critic import critic_folder

pytestmark = pytest.mark.slow

BATCH = 8
GROUP = 4
RIGHT_OR_WRONG = Reward(terms=(VerifierTerm(verifier="arithmetic", wrong=-1.0),))


@dataclass(frozen=True)
class Case:
    """One policy stage."""

    algorithm: dict[str, Any]
    work: dict[str, Any] = field(default_factory=dict)
    reward: Reward | None = None
    """The reward that the stage reads; None: the pipeline's, a reward model."""


def preset(name: str, **switches: Any) -> dict[str, Any]:
    """Return a preset, with groups that fit into the batch."""
    if Algorithm.model_validate({"preset": name}).samples_per_prompt > 1:
        switches = {"samples_per_prompt": GROUP, **switches}
    return {"preset": name, **switches}


PRESET_CASES = {name: Case(preset(name)) for name in get_args(PresetName)} | {
    # right or wrong, so that some groups are uniform and dropped; a bounded number of rounds, so that sampling ends
    "dapo": Case(preset("dapo", max_sampling_rounds=3), reward=RIGHT_OR_WRONG),
    # fast enough that KL(old‖new) leaves the band within which β stays
    "ppo_kl_penalty": Case(preset("ppo_kl_penalty"), {"learning_rate": 2e-3}),
    "cispo": Case(preset("cispo", max_sampling_rounds=3), reward=RIGHT_OR_WRONG),
    "vapo": Case(preset("vapo", length_adaptive_alpha=1.0, positive_threshold=-10.0)),
}
OTHER_CASES = {
    "fresh critic": Case(preset("ppo"), {"critic": None, "fresh_critic": "sft", "epochs": 2}),
    "shared trunk": Case(preset("ppo", shared_trunk=True, entropy_coef=0.01), {"critic": None}),
    "trust region": Case(
        preset("ppo", trust_region_kl=1e-3, trust_region_halvings=9),
        {"learning_rate": 1e-2, "epochs": 2},
    ),
    "steered KL to the reference": Case(
        preset("ppo", kl_target=0.5, kl_horizon=40), {"learning_rate": 1e-3, "epochs": 2}
    ),
    "masked ratio, and the policy waits": Case(
        preset("ppo", ratio_mask=True, policy_starts_at=1), {"epochs": 2}
    ),
    "frozen critic": Case(preset("evpo", freeze_critic="all"), {"critic_learning_rate": None, "epochs": 2}),
    "quantiles": Case(
        preset("vc_ppo", critic_head={"quantiles": 8}), {"critic": None, "fresh_critic": "sft", "epochs": 2}
    ),
    "ensemble": Case(
        preset("vc_ppo", critic_head={"ensemble": 2}, mask_agreed_share=0.3),
        {"critic": None, "fresh_critic": "sft", "epochs": 2},
    ),
    "full KL in the reward": Case(preset("a2c", kl_kind="full")),
    "full KL in the loss": Case(preset("grpo", kl_loss_kind="full")),
    "filter, dual clip and two minibatches": Case(
        preset("dapo", overlong_filter=True, drop_uniform_groups=False, dual_clip=3.0),
        {"minibatch_size": 2, "microbatch_size": 1},
    ),
}
CASES = PRESET_CASES | OTHER_CASES


def job_of(case: Case, pipeline: Any, folder: Path) -> StageJob[Any]:
    """Return the case as a stage of the tiny pipeline, with short responses and small batches."""
    switches = Algorithm.model_validate(case.algorithm)
    work = PolicyOptimization.model_validate(
        {
            "kind": "policy_optimization",
            "algorithm": case.algorithm,
            "init": "sft",
            "reference": "sft",
            "critic": "value",
            "ptx": "demonstrations" if switches.ptx_coef else None,
            "rollouts": "collected" if switches.reads_rollouts else None,
            "reward": "main",
            "prompts": "prompts",
            "iterations": 2,
            "batch_size": BATCH,
            "minibatch_size": BATCH if not switches.importance_ratio else BATCH // 2,
            "validate_every": 2,
            "validation_samples": 4,
            "learning_rate": 1e-4,
            "critic_learning_rate": 1e-4,
            **case.work,
        }
    )
    job: StageJob[Any] = pipeline.job("policy", folder=folder)
    inputs = {
        role: pipeline.folder(source)
        for role, source in (("ptx", work.ptx), ("rollouts", work.rollouts))
        if source
    }
    if work.fresh_critic is not None:
        inputs["fresh_critic"] = pipeline.folder(work.fresh_critic)
    without = {"critic"} if work.critic is None else set()
    return job.model_copy(
        update={
            "work": resolve_work(work),
            "generation": Generation(max_prompt_tokens=48, max_response_tokens=12),
            "rewards": {"main": case.reward} if case.reward else job.rewards,
            "inputs": {role: path for role, path in job.inputs.items() if role not in without} | inputs,
        }
    )


def expected_metrics(case: Case, *, reward_term: str) -> set[str]:
    """Return the curves of the page that belong to the case's switches."""
    switches = Algorithm.model_validate(case.algorithm)
    reads_values = switches.reads_critic or switches.shared_trunk
    has_values = switches.trains_critic or switches.shared_trunk
    off = {
        "explained_variance": reads_values,
        "critic_disagreement": switches.critic_head.ensemble is not None,
        "critic_weight": switches.weighs_critic,
        "value_loss": has_values,
        "value_bias": has_values,
        "value_mse": has_values,
        "value_clip_fraction": has_values,
        "grad_norm_critic": switches.trains_critic,
        "learning_rate_critic": switches.trains_critic,
        "ptx_nll": switches.ptx_coef > 0,
        "trust_region_undone": switches.trust_region_kl is not None,
        "kl_loss": switches.kl_loss_coef > 0,
        "old_kl": switches.kl_penalty_coef > 0,
        "kl_penalty_coef": switches.kl_penalty_coef > 0,
        "reward_moments_mean": switches.reward_scaling != "none",
        "reward_moments_std": switches.reward_scaling != "none",
        "greedy_score_mean": switches.advantage == "greedy_baseline",
        "baseline_mean": switches.reads_rollouts,
        "positive_nll": switches.positive_nll_coef > 0,
        **dict.fromkeys((*DEMONSTRATED, *REWARD_DATA), False),  # tests/tasks/test_monitors.py
        **dict.fromkeys(IMPORTANCE, False),  # tests/tasks/test_ahead.py, test_rollout_correction.py
        **dict.fromkeys(ENGINE, False),  # tests/tasks/rollout/test_vllm_engine.py
        **dict.fromkeys(GRAPHS, False),  # tests/tasks/test_replayed_stage.py
        **dict.fromkeys(LOSSES_OF_SWITCHES, False),  # tests/tasks/test_losses_by_oracle.py
        "weight_clip_fraction": switches.surrogate == "clipped_weight",
        "gate_slope": switches.surrogate == "soft_gate",
        **dict.fromkeys((*TERM_QUANTILES, *VALIDATION_TERMS), False),  # tests/tasks/test_named_scores.py
        **dict.fromkeys(ANSWERS, False),  # tests/tasks/rewards/test_served_scores.py
        **dict.fromkeys(ENSEMBLE, False),  # tests/tasks/test_reward_ensemble.py
        **dict.fromkeys(DIFFICULTY, False),  # tests/tasks/test_prompt_difficulty.py
        **dict.fromkeys(WATCHED, False),  # tests/tasks/test_watched_policy.py
        **dict.fromkeys(NONFINITE, False),  # tests/tasks/test_nonfinite_steps.py
        **dict.fromkeys(COMPILED, False),  # tests/tasks/test_compile.py
        **dict.fromkeys(
            ("sampler_gap", "sampler_gap_k3", "sampler_gap_worst"), switches.old_logprobs == "policy"
        ),
    }
    names = curve_metric_names("policy_optimization") - {name for name, is_on in off.items() if not is_on}
    return {name.replace("TERM", reward_term) for name in names}


def weights_at_first(job: StageJob[ResolvedPolicyOptimization]) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return what policy and critic start from, by the beginning of their names in a checkpoint."""
    switches = job.work.algorithm
    policy = load_policy(job.inputs["init"]).state_dict()
    seed = derive_seed(stage_seed(job), "init")
    if switches.shared_trunk:
        head = fresh_value_head(load_policy(job.inputs["init"]), seed=seed).state_dict()
        return {"policy.weights/policy.": policy, "policy.weights/value_head.": head}
    if switches.trains_critic:
        critic = load_critic(critic_folder(job), seed=seed, form=switches.critic_head).state_dict()
        return {"policy.weights/": policy, "critic.weights/": critic}
    return {"policy.weights/": policy}


def last_checkpoint(job: StageJob[ResolvedPolicyOptimization]) -> checkpoints.Loaded:
    """Return everything that changed, as the last checkpoint has it."""
    found = checkpoints.latest(job.scratch / CHECKPOINTS)
    assert found is not None
    modules = {"policy", "critic"} if job.work.algorithm.trains_critic else {"policy"}
    parts = {f"{name}.{part}" for name in modules for part in ("weights", "optimizer")}
    if job.work.algorithm.advantage == "tracked_mean":
        parts.add("baselines.weights")  # no optimiser changes these
    return checkpoints.load(found, required=parts | {"best", "stage", "stopped", "journal_offset"})


def same_tensors(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def run_in_two_attempts(job: StageJob, monkeypatch: pytest.MonkeyPatch) -> StageResult:
    """Stop a stage after the first iteration, then go on with it."""
    stop_after_the_first(job, monkeypatch)
    return run_stage(job)


def stop_after_the_first(job: StageJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the first of two iterations."""
    with monkeypatch.context() as patched:
        patched.setattr(preemption, "requested", lambda: True)
        with pytest.raises(preemption.Preempted, match="stopped on request after step 1 of 2"):
            run_stage(job)


def curve(job: StageJob) -> list[dict[str, float]]:
    """Return the journal's metrics of each iteration, except speed and memory."""
    return [
        {name: value for name, value in entry.metrics.items() if name not in OF_MACHINE}
        for entry in read(job.scratch / JOURNAL)
    ]


@pytest.mark.parametrize("name", list(CASES))
def test_two_iterations_report_what_they_should_and_resume_exactly(
    name: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    whole, cut = (job_of(case, pipeline, tmp_path / attempt) for attempt in ("whole", "cut"))
    result = run_stage(whole)

    # 1. What the stage reports
    steps = curve(whole)
    assert len(steps) == 2
    for step in steps:
        assert {metric for metric, value in step.items() if not isfinite(value)} == set()
    reported = set().union(*steps) | (set(OF_MACHINE) - set(OF_SERVERS))
    if (
        case.reward is not None
    ):  # a verifier may find no response right at first: equal scores have no deviation
        reported.add("validation_score_drift")
    assert reported == expected_metrics(case, reward_term="arithmetic" if case.reward else "reward")
    headline = headline_metric_names("policy_optimization") - {
        *UNCOMPILED,
        *DIFFICULTY,
        "validation_watch_score",
    }
    weighs_critic = Algorithm.model_validate(case.algorithm).weighs_critic
    assert set(result.metrics) == headline - ({"critic_weight_mean"} if not weighs_critic else set())
    waits = Algorithm.model_validate(case.algorithm).policy_starts_at
    assert all(step["ratio_deviation_first"] < 1e-5 for step in steps[waits:])

    # 2. The weights moved
    after = last_checkpoint(whole)
    is_frozen = Algorithm.model_validate(case.algorithm).freeze_critic == "attention"
    for part, weights in weights_at_first(whole).items():
        unmoved = {
            name for name, tensor in weights.items() if torch.equal(tensor, after.tensors[part + name])
        }
        kept = {name for name in weights if is_frozen and part == "critic.weights/" and ".self_attn." in name}
        assert unmoved == kept, part

    # 3. Adapted coefficients changed, and nothing else
    switches = Algorithm.model_validate(case.algorithm)
    state = after.state["stage"]
    assert (state["kl_coef"] != switches.kl_coef) == (switches.kl_target is not None)
    assert (state["kl_penalty_coef"] != switches.kl_penalty_coef) == (switches.kl_penalty_target is not None)
    seen = 2 * BATCH if switches.reward_scaling != "none" else 0
    assert state["moments"]["count"] == seen
    assert state["batches"] == sum(step["sampling_rounds"] for step in steps)
    assert (state["batches"] > 2) == switches.drop_uniform_groups
    if switches.trust_region_kl is not None:
        assert sum(step["trust_region_undone"] for step in steps) > 0

    # 4. Stopped and resumed, the stage ends with the same bits
    assert run_in_two_attempts(cut, monkeypatch) == result
    resumed = last_checkpoint(cut)
    assert resumed.step == after.step == 2
    assert same_tensors(resumed.tensors, after.tensors)
    assert resumed.state["stage"] == after.state["stage"]
    assert curve(cut) == steps
    assert (cut.output / "model.safetensors").read_bytes() == (
        whole.output / "model.safetensors"
    ).read_bytes()


def test_where_every_step_is_too_far_the_policy_stays_and_each_epoch_ends(
    pipeline: Any, tmp_path: Path
) -> None:
    """In each of two epochs of two minibatches, the first step is tried whole and halved, and the second never is."""
    algorithm = preset("ppo", trust_region_kl=1e-12, trust_region_halvings=1)
    job = job_of(Case(algorithm, {"epochs": 2, "iterations": 1}), pipeline, tmp_path)
    run_stage(job)
    after, at_first = last_checkpoint(job), weights_at_first(job)
    assert curve(job)[0]["trust_region_undone"] == 2 * 2
    policy = at_first["policy.weights/"]
    assert all(
        torch.equal(tensor, after.tensors[f"policy.weights/{name}"]) for name, tensor in policy.items()
    )
    critic = at_first["critic.weights/"]
    assert not any(
        torch.equal(tensor, after.tensors[f"critic.weights/{name}"]) for name, tensor in critic.items()
    )


def test_a_frozen_critic_s_attention_stays_and_everything_else_of_it_learns(
    pipeline: Any, tmp_path: Path
) -> None:
    job = job_of(Case(preset("ppo", freeze_critic="attention"), {"weight_decay": 0.1}), pipeline, tmp_path)
    run_stage(job)
    after, before = last_checkpoint(job), weights_at_first(job)["critic.weights/"]
    unmoved = {
        name
        for name, tensor in before.items()
        if torch.equal(tensor, after.tensors[f"critic.weights/{name}"])
    }
    assert unmoved == {name for name in before if ".self_attn." in name} != set()
    assert not any(".self_attn." in name for name in after.tensors if name.startswith("critic.optimizer"))


def test_a_policy_that_waits_stays_what_it_is_while_its_critic_learns(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(Case(preset("ppo", policy_starts_at=1, trust_region_kl=1.0)), pipeline, tmp_path)
    stop_after_the_first(job, monkeypatch)
    after, before = last_checkpoint(job), weights_at_first(job)
    for part, stays in (("policy.weights/", True), ("critic.weights/", False)):
        same = [torch.equal(tensor, after.tensors[part + name]) for name, tensor in before[part].items()]
        assert set(same) == {stays}, part
    run_stage(job)
    of_the_policy = {"policy_loss", "ratio_deviation_first", "trust_region_undone"}
    waiting, learning = curve(job)
    assert not of_the_policy & waiting.keys(), "no ratio was computed"
    assert {"value_loss", "grad_norm_critic"} <= waiting.keys()
    assert of_the_policy <= learning.keys()
