"""The key of each kind of stage depends on its switches, returns, judges, and data that a stage collected."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization, RewardModelling
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm
from vantage.schemas.recipe.work import Work
from vantage.schemas.records.stage_key import dumped, key_parts, stage_key


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


VERIFIED = Reward(terms=(VerifierTerm(verifier="arithmetic"),))


def parts_of(
    work: Work, *roles: str, rewards: dict[str, Reward] | None = None, **inputs: str
) -> dict[str, Any]:
    return key_parts(
        work,
        generation=Generation(),
        rewards=rewards or {},
        seed=17,
        inputs={**{role: digest(role) for role in roles}, **inputs},
        extra={},
    )


def policy_key(algorithm: Any) -> str:
    work = PolicyOptimization(
        kind="policy_optimization", algorithm=algorithm, init="sft", critic="value", ptx="demos",
        reward="main", prompts="tasks", batch_size=64, minibatch_size=64,
    )  # fmt: skip
    return stage_key(parts_of(work, "init", "critic", "prompts", "ptx", rewards={"main": VERIFIED}))


# -- policy optimisation


CHANGED: dict[str, Any] = {
    "gamma": 0.9, "kl_coef": 0.1, "kl_kind": "k3", "reward_scaling": "scale", "reward_clip": 0.3,
    "overlong_buffer": 0.2, "advantage": "returns_to_go", "lambda_policy": 0.9, "length_adaptive_alpha": 1.0,
    "lambda_value": 1.0, "whiten_advantages": False, "normalise_advantages": True, "advantage_clip": 0.5,
    "samples_per_prompt": 2, "drop_uniform_groups": True, "max_sampling_rounds": 3, "importance_ratio": False,
    "clip_range_low": 0.1, "clip_range_high": 0.28, "dual_clip": 3.0, "aggregation": "sequence",
    "overlong_filter": True, "kl_target": 6.0, "kl_horizon": 100, "kl_loss_coef": 0.1, "kl_loss_kind": "k3",
    "kl_penalty_coef": 0.5, "kl_penalty_kind": "k1", "kl_penalty_target": 0.02, "trust_region_kl": 0.1,
    "trust_region_halvings": 1, "epoch_kl_target": 0.02, "rollout_correction": "tis", "value_clip_range": None, "shared_trunk": True, "value_coef": 1.0,
    "entropy_coef": 0.01, "positive_nll_coef": 0.1, "positive_threshold": 0.5, "positive_verifier": "arithmetic",
    "ptx_coef": 0.1, "gae_horizon": 8, "bootstrap_truncated": True, "critic_ev_threshold": 0.0,
    "critic_ev_hysteresis": 0.1, "critic_blend": True, "normalise_each_score": True,
    "ratio_mask": True, "ratio_mask_gradient": True, "freeze_critic": "attention", "policy_starts_at": 3,
    "old_logprobs": "sampler", "critic_steps": 2, "critic_first": True,
    "optimal_value_beta": 1.0, "tracker_kl_half_life": 0.1, "tracker_memory_low": 0.5, "tracker_memory_high": 0.9,
    "surrogate": "clipped_weight", "ratio_level": "sequence", "soft_gate_positive": 1.5, "soft_gate_negative": 2.0,
    "covariance": "clip", "covariance_share": 0.1, "covariance_low": 0.5, "covariance_high": 4.0, "covariance_kl_coef": 0.5,
    "kl_loss_gradient": "unbiased", "kl_credit": "token",
    "entropy_target": 0.2, "entropy_step": 0.01, "entropy_coef_max": 0.5,
    "critic_head": {"quantiles": 8}, "mask_agreed_share": 0.2,
}  # fmt: skip
"""Switch → a value that is not the one of ``ppo``."""
COMPANY: dict[str, dict[str, Any]] = {
    "drop_uniform_groups": {"samples_per_prompt": 2},
    "kl_penalty_target": {"kl_penalty_coef": 0.5},
    "positive_nll_coef": {"positive_threshold": 0.5},
    "critic_head": {"value_clip_range": None},
    "mask_agreed_share": {"value_clip_range": None, "critic_head": {"ensemble": 2}},
    "normalise_each_score": {
        "advantage": "group_normalised",
        "kl_coef": 0.0,
        "samples_per_prompt": 2,
        "whiten_advantages": False,
    },
}
"""Switch → what must stand beside it."""


def test_every_switch_is_in_the_key() -> None:
    missing = []
    for switch in Algorithm.model_fields.keys() - {"preset"}:
        base = {"preset": "ppo", **COMPANY.get(switch, {})}
        if policy_key({**base, switch: CHANGED[switch]}) == policy_key(base):
            missing.append(switch)
    assert CHANGED.keys() == Algorithm.model_fields.keys() - {"preset"}
    assert missing == []


def test_what_is_sampled_ahead_is_in_the_key_and_what_is_not_is_in_none() -> None:
    def key(**rollout: Any) -> str:
        names = {"algorithm": "ppo", "init": "sft", "critic": "value", "reward": "main", "prompts": "tasks"}
        work = PolicyOptimization.model_validate({"kind": "policy_optimization", **names, **rollout})
        return stage_key(parts_of(work, "init", "critic", "prompts", rewards={"main": VERIFIED}))

    ahead = [key(rollout={"ahead": 1}), key(rollout={"ahead": 1, "importance_cap": 5.0})]
    assert len({key(), *ahead}) == 3
    assert key(rollout={"ahead": 0}) == key()


def test_the_name_of_a_preset_is_in_no_key() -> None:
    switches = Algorithm.model_validate("vapo").model_dump()
    keys = {policy_key({**switches, "preset": preset}) for preset in ("vapo", "ppo", "grpo", "rloo")}
    assert keys == {policy_key("vapo")}


def test_each_preset_makes_another_policy() -> None:
    presets = (
        "policy_gradient", "a2c", "ppo", "vc_ppo", "vapo", "evpo", "sao", "rloo", "remax", "grpo", "dr_grpo", "dapo",
    )  # fmt: skip
    assert len({policy_key(preset) for preset in presets}) == len(presets)


def test_a_fresh_critic_is_another_input_than_a_critic() -> None:
    def parts(critic: str) -> dict[str, Any]:
        names = {"init": "sft", critic: "sft", "reward": "main", "prompts": "tasks"}
        work = PolicyOptimization.model_validate({"kind": "policy_optimization", "algorithm": "ppo", **names})
        return parts_of(work, "init", "prompts", rewards={"main": VERIFIED}, **{critic: digest("sft")})

    assert set(parts("fresh_critic")["inputs"]) == {"init", "reference", "fresh_critic", "prompts"}
    assert stage_key(parts("fresh_critic")) != stage_key(parts("critic"))


@pytest.mark.parametrize("term", [{"wrong": -1.0}, {"weight": 2.0}])
def test_what_a_term_pays_is_in_the_key(term: dict[str, Any]) -> None:
    def key(reward: Reward) -> str:
        work = BestOfN(kind="best_of_n", init="sft", reward="main", prompts="tasks")
        return stage_key(parts_of(work, "init", "prompts", rewards={"main": reward}))

    assert key(Reward(terms=(VerifierTerm(verifier="arithmetic", **term),))) != key(VERIFIED)


# -- the critic


def value_parts(**fields: Any) -> dict[str, Any]:
    work = ValuePretraining(
        kind="value_pretraining", policy="sft", init="reward", reward="main", prompts="tasks", **fields
    )
    return parts_of(work, "policy", "init", "prompts", rewards={"main": VERIFIED})


def test_what_the_critic_predicts_stands_in_its_key() -> None:
    returns = {
        "gamma": 0.9, "kl_coef": 0.1, "kl_kind": "k3", "reward_scaling": "scale", "reward_clip": 0.3,
        "overlong_buffer": 0.2,
    }  # fmt: skip
    assert value_parts(returns=returns)["configuration"]["returns"] == returns
    keys = {stage_key(value_parts(returns={switch: value})) for switch, value in returns.items()}
    assert len(keys | {stage_key(value_parts(returns={}))}) == len(returns) + 1


# -- preferences that a stage collected


def collection_parts(
    judge: dict[str, str] | None, rewards: dict[str, Reward], /, **inputs: str
) -> dict[str, Any]:
    over = {"prompts": "tasks", "judge": judge} if judge else {"demonstrations": "demos"}
    work = PreferenceCollection.model_validate({"kind": "preference_collection", "policy": "sft", **over})
    roles = ("policy", "prompts") if judge else ("policy", "demonstrations")
    return parts_of(work, *roles, rewards=rewards, **inputs)


def test_a_reward_that_judges_pairs_is_known_by_content() -> None:
    def parts(reward: str, scorer: str) -> dict[str, Any]:
        definition = Reward(terms=(ModelTerm(model=f"model_of_{reward}"),))
        return collection_parts(
            {"reward": reward}, {reward: definition}, **{f"reward.{reward}.0": digest(scorer)}
        )

    assert parts("main", "scorer") == parts("renamed", "scorer")
    assert stage_key(parts("main", "scorer")) != stage_key(parts("main", "another"))
    assert parts("main", "scorer")["rewards"]["judge"]["terms"][0]["model"] == digest("scorer")


def test_the_verifier_that_judges_pairs_stands_in_the_key() -> None:
    judged, demonstrated = collection_parts({"verifier": "arithmetic"}, {}), collection_parts(None, {})
    assert judged["configuration"]["judge"] == {"verifier": "arithmetic"}
    assert judged["rewards"] == {}
    assert demonstrated["configuration"]["judge"] is None
    assert set(demonstrated["inputs"]) == {"policy", "demonstrations"}


def test_a_verifier_of_the_recipe_is_known_by_content() -> None:
    def judged(name: str, file: str) -> dict[str, Any]:
        return collection_parts({"verifier": name}, {}, judge=digest(file))

    assert judged("mine", "verify.py") == judged("renamed", "verify.py")
    assert stage_key(judged("mine", "verify.py")) != stage_key(judged("mine", "another.py"))


def test_another_revision_of_a_kind_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = collection_parts(None, {})
    row = KINDS["preference_collection"]
    monkeypatch.setitem(KINDS, row.name, replace(row, revision=row.revision + 1))
    assert stage_key(collection_parts(None, {})) != stage_key(before)


@pytest.mark.parametrize(
    "work",
    [
        RewardModelling(kind="reward_model", init="sft", data="collected"),
        DirectPreferenceOptimization(kind="dpo", init="sft", data="collected"),
    ],
)
def test_who_learns_preferences_knows_them_by_content_whoever_made_them(work: Any) -> None:
    renamed = work.model_copy(update={"data": "pairs"})
    assert parts_of(work, "init", "data") == parts_of(renamed, "init", "data")
    assert stage_key(parts_of(work, "init", data=digest("others"))) != stage_key(
        parts_of(work, "init", "data")
    )


def test_rankings_are_another_input_than_pairs() -> None:
    work = RewardModelling(kind="reward_model", init="sft", rankings="ranked")
    assert set(parts_of(work, "init", "rankings")["inputs"]) == {"init", "rankings"}
    with pytest.raises(ValueError, match="reward_model stage: the content digest of 'rankings' is missing"):
        parts_of(work, "init", "data")


def test_dpo_is_held_to_what_it_starts_from_unless_it_says_otherwise() -> None:
    work = DirectPreferenceOptimization(kind="dpo", init="sft", data="pairs")
    assert parts_of(work, "init", "data")["inputs"]["reference"] == digest("init")
    other = work.model_copy(update={"reference": "model"})
    assert parts_of(other, "init", "data", "reference")["inputs"]["reference"] == digest("reference")


@pytest.mark.parametrize("switches", [{"loss": "simpo", "beta": 2.0, "target_margin": 1.0}, {"loss": "orpo"}])
def test_a_loss_without_a_reference_has_none_in_its_key(switches: dict[str, Any]) -> None:
    work = DirectPreferenceOptimization.model_validate(
        {"kind": "dpo", "init": "sft", "data": "pairs", **switches}
    )
    assert set(parts_of(work, "init", "data")["inputs"]) == {"init", "data"}


def test_how_many_are_sampled_side_by_side_is_in_no_key() -> None:
    """``max_rows`` changes no key, neither beside other fields of ``rollout`` nor alone."""
    names = {"algorithm": "ppo", "init": "sft", "critic": "value", "reward": "main", "prompts": "tasks"}
    for rollout in ({}, {"ahead": 1}):
        keys = {
            stage_key(parts_of(
                PolicyOptimization.model_validate(
                    {"kind": "policy_optimization", **names, "rollout": {**rollout, **rows}}
                ),
                "init", "critic", "prompts", rewards={"main": VERIFIED},
            ))
            for rows in ({}, {"max_rows": 4}, {"max_rows": 64})
        }  # fmt: skip
        assert len(keys) == 1
    plain = {
        "kind": "evaluation",
        "candidate": "a",
        "baseline": "b",
        "judge": {"verifier": "exact_match"},
        "prompts": "c",
    }
    few = PolicyEvaluation.model_validate({**plain, "rollout": {"max_rows": 3}})
    assert dumped(few) == dumped(PolicyEvaluation.model_validate(plain))
    assert few.model_dump(mode="json")["rollout"] == {"max_rows": 3}, "a recipe's file keeps it"
