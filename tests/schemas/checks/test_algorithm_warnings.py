"""Mixtures of switches that a source warns against give a warning: each sentence appears for its cause and for nothing else."""

from typing import Any, get_args

import pytest

from tests.support.every import every
from vantage.schemas.checks.agreement import resolve
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.presets import PresetName
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.steps import dependencies

SCALING = (
    "stages.policy.algorithm.reward_scaling: dividing by a running σ was compared and is not recommended "
    "(arXiv 2307.04964 §5.3.1); use normalise with reward_clip"
)


def warned(plain: dict[str, Any]) -> list[str]:
    recipe, problems = resolve(Recipe.model_validate(plain))
    assert problems == []
    return warnings(recipe, dependencies(recipe))


@pytest.fixture
def plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the small recipe with responses long enough for VAPO's α, and PPO as its algorithm."""
    plain["stages"]["policy"]["algorithm"] = "ppo"
    return {**plain, "generation": {"max_response_tokens": 512}}


def with_algorithm(plain: dict[str, Any], algorithm: Any) -> dict[str, Any]:
    """Return the recipe with an algorithm and what belongs to it: one step where it has no ratio, no unread critic."""
    switches = Algorithm.model_validate(algorithm)
    plain["stages"]["policy"] |= {"algorithm": algorithm, "ptx": "demos"}
    if not switches.importance_ratio:
        plain["stages"]["policy"]["minibatch_size"] = 256
    if not switches.reads_critic:
        plain["stages"].pop("value")
        plain["stages"]["policy"].pop("critic")
    if switches.reads_rollouts:
        collected = {"kind": "rollout_collection", "policy": "sft", "prompts": "tasks", "reward": "main"}
        plain["stages"] = {"collected": collected, **plain["stages"]}
        plain["stages"]["policy"]["rollouts"] = "collected"
    if switches.drop_uniform_groups:
        plain["rewards"]["main"]["terms"] = [{"verifier": "arithmetic", "wrong": -1.0}]
    return plain


@every("preset", get_args(PresetName))
def test_a_preset_in_a_sound_recipe_is_warned_of_only_where_its_own_source_warns(
    plain: dict[str, Any], preset: str
) -> None:
    assert warned(with_algorithm(plain, preset)) == ([SCALING] if preset == "ppo_max_scaling" else [])


IN_REWARD = "kl_kind: in the reward, {} misleads: {}; use k1"
MIXED = (
    "value_clip_range: together with normalised rewards and advantages; PPO-max's authors recommend not to mix the "
    "three (arXiv 2307.04964 appendix B); set value_clip_range: null"
)
ALONE = (
    "samples_per_prompt: with one response there is nothing that {} could compare it with: every advantage is 0 "
    "(RLOO, arXiv 2402.14740; GRPO, arXiv 2402.03300); raise it"
)


@every(
    ("switches", "said"),
    [
        ({"kl_kind": "abs"}, IN_REWARD.format("abs", "|Δ| is no unbiased estimate of a KL divergence")),
        ({"kl_kind": "k2"},
         IN_REWARD.format("k2", "½Δ² is biased, and as a reward its gradient is not that of KL(π‖ref)")),
        ({"kl_kind": "k3"},
         IN_REWARD.format("k3", "near the reference its penalty's gradient is almost orthogonal to that of KL(π‖ref)")),
        ({"kl_kind": "full"},
         IN_REWARD.format("full", "it is the same whichever token was drawn, so it tells the current token nothing")),
        ({"kl_coef": 0, "kl_loss_coef": 0.1, "kl_loss_kind": "abs"},
         "kl_loss_kind: |Δ| is no unbiased estimate of a KL divergence; use k2, k3 or full"),
        ({"kl_loss_coef": 0.1},
         "kl_loss_coef: KL to the reference is in the reward and in the loss; REINFORCE++ with a baseline "
         "(arXiv 2501.03262 eq. 6-8) has it in the loss alone; set one of kl_coef and kl_loss_coef to 0"),
        ({"reward_scaling": "scale"}, SCALING.removeprefix("stages.policy.algorithm.")),
        ({"preset": "ppo_max_normalised", "value_clip_range": 0.2}, MIXED),
        ({"preset": "ppo_max", "normalise_advantages": True}, MIXED),
        ({"preset": "ppo_max", "advantage_clip": 0.5}, MIXED),
        ({"normalise_advantages": True},
         "normalise_advantages: undoes what whiten_advantages did to the whole rollout; set one of them to false"),
        ({"preset": "rloo", "samples_per_prompt": 1}, ALONE.format("leave_one_out")),
        ({"preset": "dr_grpo", "samples_per_prompt": 1}, ALONE.format("group_mean")),
        ({"preset": "grpo", "samples_per_prompt": 1}, ALONE.format("group_normalised")),
        ({"preset": "grpo", "aggregation": "constant"},
         "aggregation: constant removes GRPO's length bias but advantage=group_normalised keeps that of its standard "
         "deviation; Dr. GRPO (arXiv 2503.20783) removes both; use advantage: group_mean"),
    ],
)  # fmt: skip
def test_mixtures(plain: dict[str, Any], switches: dict[str, Any], said: str) -> None:
    """This mixture of switches gives its warning, and no other."""
    plain = with_algorithm(plain, {"preset": "ppo", **switches})
    assert warned(plain) == [f"stages.policy.algorithm.{said}"]


@every(
    "switches",
    [
        *({"kl_kind": kind, "kl_coef": 0} for kind in ("abs", "k2", "k3", "full")),
        {"kl_loss_kind": "abs"},
        *({"kl_coef": 0, "kl_loss_coef": 0.1, "kl_loss_kind": kind} for kind in ("k2", "k3", "full")),
        {"reward_scaling": "normalise"},
        {"reward_clip": 0.3, "advantage_clip": 0.5},
        {"whiten_advantages": False, "normalise_advantages": True},
        {"preset": "ppo_max_normalised", "reward_scaling": "none", "value_clip_range": 0.2},
        {"preset": "ppo_max", "normalise_advantages": True, "advantage": "returns_to_go"},
        {"preset": "vapo", "advantage": "leave_one_out", "length_adaptive_alpha": 0.001},
        {"preset": "vapo", "advantage": "leave_one_out", "lambda_policy": 0.5},
        {"preset": "rloo", "samples_per_prompt": 2},
        {"preset": "remax", "samples_per_prompt": 1},
        {"preset": "dr_grpo", "aggregation": "token"},
        {"preset": "reinforce_pp", "gamma": 0.99},
        {"preset": "rloo", "aggregation": "constant"},
        {"dual_clip": 3.0},
        {"shared_trunk": True},
        {"preset": "dapo", "overlong_filter": True},
        {"trust_region_kl": 0.02},
        {"kl_target": 6.0},
        {"entropy_coef": 0.01},
        {"lambda_policy": 1.0},
        {"gae_horizon": 2, "lambda_policy": 1.0},
    ],
)
def test_half_a_mixture_is_none(plain: dict[str, Any], switches: dict[str, Any]) -> None:
    found = warned(with_algorithm(plain, {"preset": "ppo", **switches}))
    assert [sentence for sentence in found if " is not read " not in sentence] == []


def test_several_causes_are_several_sentences(plain: dict[str, Any]) -> None:
    switches = {"kl_kind": "k3", "kl_loss_coef": 0.1, "reward_scaling": "scale"}
    found = warned(with_algorithm(plain, {"preset": "ppo", **switches}))
    fields = [sentence.removeprefix("stages.policy.algorithm.").partition(":")[0] for sentence in found]
    assert fields == ["kl_kind", "kl_loss_coef", "reward_scaling"]


def test_a_switch_that_is_not_read_is_told_with_its_stage(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", "lambda_policy": 0.9}
    assert warned(plain) == [
        "stages.policy.algorithm.lambda_policy: 0.9 is not read while length_adaptive_alpha is set; "
        "set length_adaptive_alpha: null, or leave lambda_policy out"
    ]
    plain["stages"]["policy"]["algorithm"]["length_adaptive_alpha"] = None
    assert warned(plain) == []


def test_a_sentence_names_the_stage_that_it_is_about(plain: dict[str, Any]) -> None:
    plain["stages"]["other"] = {
        **plain["stages"]["policy"],
        "algorithm": {"preset": "ppo", "normalise_advantages": True},
    }
    (found,) = warned(plain)
    assert found.startswith("stages.other.algorithm.normalise_advantages: ")


# -- with the rest of the recipe


def test_groups_that_a_reward_model_scores_never_agree(plain: dict[str, Any]) -> None:
    plain = with_algorithm(plain, "dapo")
    plain["rewards"]["main"]["terms"].append({"model": "reward"})
    assert warned(plain) == [
        "stages.policy.algorithm.drop_uniform_groups: scores of the reward model 'reward' are never all equal, "
        "so no group is dropped; DAPO (arXiv 2503.14476) scores with a verifier"
    ]
    plain["stages"]["policy"]["algorithm"] = {"preset": "dapo", "drop_uniform_groups": False}
    assert warned(plain) == []


@every(
    ("alpha", "longest", "extent"),
    [
        (0.05, 20, "every response"),
        (0.05, 21, "responses of up to 20 tokens"),
        (0.05, 40, "responses of up to 20 tokens"),
        (0.05, 41, None),
        (1.0, 3, None),
        (1.0, 1, "every response"),
    ],
)
def test_an_alpha_that_makes_lambda_zero(
    plain: dict[str, Any], alpha: float, longest: int, extent: str | None
) -> None:
    plain["generation"] = {"max_response_tokens": longest}
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", "length_adaptive_alpha": alpha}
    found = warned(plain)
    if extent is None:
        assert found == []
    else:
        assert found == [
            f"stages.policy.algorithm.length_adaptive_alpha: {alpha:g} makes λ = 1 − 1/(α·l) zero for {extent} "
            f"(VAPO, arXiv 2504.05118 eq. 4-5), and the longest have {longest}; short tasks need a larger α"
        ]


def test_a_reward_model_as_critic(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["critic"] = "reward"
    plain["stages"].pop("value")
    (found,) = warned(plain)
    assert found.startswith("stages.policy.critic: a reward model scores unfinished text low")
    assert "arXiv 2503.01491" in found


def test_a_critic_of_another_policy(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"] |= {"init": "model", "reference": "sft"}
    assert warned(plain) == [
        "stages.policy.init: 'model' is not the policy whose responses the critic 'value' was pretrained on ('sft')"
    ]


def test_a_fresh_critic_that_the_policy_learns_from_at_once(plain: dict[str, Any]) -> None:
    del plain["stages"]["value"]
    plain["stages"]["policy"] |= {"algorithm": "sao", "critic": None, "fresh_critic": "sft"}
    assert warned(plain) == [
        "stages.policy.fresh_critic: the policy learns from a critic that has learned nothing; pretrain one, or set "
        "policy_starts_at (SAO, arXiv 2607.07508 §4.1: 10 iterations)"
    ]
    plain["stages"]["policy"]["algorithm"] = {"preset": "sao", "policy_starts_at": 10}
    assert warned(plain) == []


def test_a_fresh_critic_is_not_warned_of(plain: dict[str, Any]) -> None:
    plain["stages"].pop("value")
    plain["stages"]["policy"] |= {"critic": None, "fresh_critic": "sft"}
    assert warned(plain) == []


def test_a_critic_that_is_not_read_is_not_warned_of(plain: dict[str, Any]) -> None:
    plain["stages"].pop("value")
    plain["stages"]["policy"] |= {"critic": "reward", "algorithm": "dr_grpo"}
    assert warned(plain) == []


def test_a_threshold_on_scores_without_a_zero(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["algorithm"] = "vapo"
    assert warned(plain) == []
    del plain["stages"]["reward"]["centre_on"]
    (found,) = warned(plain)
    assert found.startswith(
        "stages.policy.algorithm.positive_threshold: 0 is compared with scores of 'reward'"
    )
    assert found.endswith("set stages.reward.centre_on")
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", "positive_verifier": "arithmetic"}
    assert warned(plain) == []
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", "positive_nll_coef": 0}
    assert warned(plain) == []


def test_members_without_a_zero_are_warned_of_once_as_the_stage_that_the_recipe_writes(
    plain: dict[str, Any],
) -> None:
    plain["stages"]["policy"]["algorithm"] = "vapo"
    member = plain["stages"].pop("reward") | {"centre_on": None}
    members = {f"reward_{each}": {**member, "member": {"of": "reward", "number": each}} for each in (1, 2)}
    plain["stages"] = {"sft": plain["stages"].pop("sft"), **members, **plain["stages"]}
    plain["stages"]["value"]["init"] = "sft"
    plain["rewards"]["main"] = {
        "terms": [{"model": each} for each in members],
        "ensemble": {"combine": "min"},
    }
    (found,) = warned(plain)
    assert "with scores of 'reward'" in found
    assert found.endswith("set stages.reward.centre_on")


def test_a_verifiers_scores_have_a_zero(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["algorithm"] = "vapo"
    plain["rewards"]["main"]["terms"] = [{"verifier": "arithmetic", "wrong": -1.0}]
    assert warned(plain) == []


def unclipped(**switches: Any) -> dict[str, Any]:
    return {"preset": "vapo", "clip_range_low": None, "clip_range_high": None, **switches}


def test_several_steps_without_a_clip(plain: dict[str, Any]) -> None:
    steps = {"batch_size": 64, "minibatch_size": 32, "epochs": 3}
    plain["stages"]["policy"] |= {"algorithm": unclipped(), **steps}
    assert warned(plain) == [
        "stages.policy.algorithm: the ratio is not clipped, but 6 optimiser steps are taken on each rollout; "
        "only the first of them is a policy gradient (PPO, arXiv 1707.06347 §2-3)"
    ]
    plain["stages"]["policy"] |= {"minibatch_size": 64, "epochs": 1}
    assert warned(plain) == []


@pytest.mark.parametrize(
    "held",
    [
        {"clip_range_high": 0.2},
        {"clip_range_low": 0.2},
        {"kl_penalty_coef": 1.0},
        {"trust_region_kl": 0.02},
    ],
)
def test_steps_that_something_else_holds_together(plain: dict[str, Any], held: dict[str, Any]) -> None:
    plain["stages"]["policy"] |= {"algorithm": unclipped(**held), "epochs": 3}
    assert warned(plain) == []


@pytest.mark.parametrize(("minibatch_size", "is_said"), [(256, True), (128, False)])
def test_a_penalty_on_moving_away_needs_a_second_step(
    plain: dict[str, Any], minibatch_size: int, is_said: bool
) -> None:
    """KL(old‖new) and its gradient are 0 where the policy is still the one that sampled."""
    plain["stages"]["policy"] |= {"algorithm": "ppo_kl_penalty", "minibatch_size": minibatch_size}
    found = [line for line in warned(plain) if "kl_penalty_coef: KL(old‖new) has no gradient" in line]
    assert bool(found) == is_said
    plain["stages"]["policy"] |= {"epochs": 2}
    assert not [line for line in warned(plain) if "has no gradient" in line]


@pytest.mark.parametrize(("horizon", "is_told"), [(511, False), (512, True), (4096, True)])
def test_a_horizon_that_no_response_reaches(plain: dict[str, Any], horizon: int, is_told: bool) -> None:
    found = warned(with_algorithm(plain, {"preset": "ppo", "gae_horizon": horizon}))
    said = (
        f"stages.policy.algorithm.gae_horizon: {horizon} cuts no sum short, since no response has more than 512 tokens "
        "(generation.max_response_tokens); lower it, or leave gae_horizon out"
    )
    assert found == ([said] if is_told else [])


@pytest.mark.parametrize("rule", [None, {"subtract": 1.0}, {"replace": -1.0}])
def test_a_cut_that_is_paid_for_and_goes_on(plain: dict[str, Any], rule: dict[str, float] | None) -> None:
    plain["rewards"]["main"]["missing_eos"] = rule
    found = warned(with_algorithm(plain, {"preset": "ppo", "bootstrap_truncated": True}))
    said = (
        "stages.policy.algorithm.bootstrap_truncated: rewards.main.missing_eos makes the cut the end of a response and "
        "pays for it, and the bootstrap adds the value of going on; use one of the two"
    )
    assert found == ([said] if rule else [])
    assert warned(with_algorithm(plain, {"preset": "ppo"})) == []
