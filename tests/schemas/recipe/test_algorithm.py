"""The presets are those of their papers: the table is written out here once more, by hand, row by row."""

from typing import Any, NamedTuple, get_args

import pytest
from pydantic import ValidationError

from tests.support.every import every
from vantage.schemas.recipe.algorithm import GROUPED, Algorithm, Returns
from vantage.schemas.recipe.critic_head import CriticHead
from vantage.schemas.recipe.presets import PRESETS, PresetName
from vantage.schemas.recipe.rollout_correction import RolloutCorrection

OFF: dict[str, Any] = {
    "gamma": 1.0, "kl_coef": 0.0, "kl_kind": "k1", "reward_scaling": "none", "reward_clip": None,
    "overlong_buffer": None, "length_adaptive_alpha": None, "whiten_advantages": False,
    "normalise_advantages": False, "advantage_clip": None, "samples_per_prompt": 1, "drop_uniform_groups": False,
    "max_sampling_rounds": 10, "importance_ratio": True, "dual_clip": None, "overlong_filter": False,
    "kl_target": None, "kl_horizon": 10_000, "kl_loss_coef": 0.0, "kl_loss_kind": "k2", "kl_penalty_coef": 0.0,
    "kl_penalty_kind": "k3", "kl_penalty_target": None, "trust_region_kl": None, "trust_region_halvings": 3, "epoch_kl_target": None,
    "value_clip_range": None, "shared_trunk": False, "value_coef": 0.5, "entropy_coef": 0.0,
    "positive_nll_coef": 0.0, "positive_threshold": None, "positive_verifier": None, "ptx_coef": 0.0,
    "gae_horizon": None, "bootstrap_truncated": False,
    "critic_ev_threshold": None, "critic_ev_hysteresis": None, "critic_blend": False,
    "normalise_each_score": False,
    "ratio_mask": False, "ratio_mask_gradient": False, "freeze_critic": "none", "policy_starts_at": 0,
    "old_logprobs": "policy", "critic_steps": 1, "critic_first": False, "rollout_correction": None,
    "optimal_value_beta": 0.5, "tracker_kl_half_life": 0.06, "tracker_memory_low": 0.875, "tracker_memory_high": 0.96,
    "surrogate": "clipped", "ratio_level": "token", "soft_gate_positive": 1.0, "soft_gate_negative": 1.05,
    "covariance": "none", "covariance_share": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0, "covariance_kl_coef": 1.0,
    "kl_loss_gradient": "estimate", "kl_credit": "response",
    "entropy_target": None, "entropy_step": 0.005, "entropy_coef_max": 1.0,
    "critic_head": CriticHead(), "mask_agreed_share": None,
}  # fmt: skip
"""Switch → what it is where a row of the table says nothing of it: off, or not read."""

REWARD_K1 = {"kl_coef": 0.05, "kl_kind": "k1"}
"""KL in the reward; the coefficient is PPO-max's."""
NO_KL: dict[str, Any] = {}
NO_CLIP = (None, None)
WHITENED = {"whiten_advantages": True}
ONE_STEP = {"importance_ratio": False}
NOT_READ = None


class Row(NamedTuple):
    """The seven columns of a row of the table."""

    critic: bool
    advantage: str
    lambdas: tuple[float, float] | None
    """λ_policy (where it is one number) and λ_value; None: the advantage reads none."""
    clip: tuple[float | None, float | None]
    aggregation: str
    kl: dict[str, Any]
    extras: dict[str, Any]


TABLE: dict[str, Row] = {
    "policy_gradient": Row(False, "returns_to_go", NOT_READ, NO_CLIP, "sequence_sum", REWARD_K1, ONE_STEP),
    "a2c": Row(True, "gae", (0, 0), NO_CLIP, "token", REWARD_K1, ONE_STEP),
    "ppo": Row(True, "gae", (0.95, 0.95), (0.2, 0.2), "token", REWARD_K1, {**WHITENED, "value_clip_range": 0.2}),
    "ppo_kl_penalty": Row(True, "gae", (0.95, 0.95), NO_CLIP, "token", REWARD_K1,
                          {**WHITENED, "kl_penalty_coef": 1.0, "kl_penalty_kind": "k3", "kl_penalty_target": 0.01}),
    "ppo_max": Row(True, "gae", (0.95, 0.95), (0.2, 0.2), "token", REWARD_K1,
                   {"reward_scaling": "normalise", "reward_clip": 0.3, "value_clip_range": 0.2, "ptx_coef": 0.1}),
    "ppo_max_scaling": Row(True, "gae", (0.95, 0.95), (0.2, 0.2), "token", REWARD_K1,
                           {"reward_scaling": "scale", "value_clip_range": 0.2}),
    "ppo_max_normalised": Row(True, "gae", (0.95, 0.95), (0.2, 0.2), "token", REWARD_K1,
                              {"reward_scaling": "normalise", "reward_clip": 0.3,
                               "normalise_advantages": True, "advantage_clip": 0.5}),
    "ppo_vapo_baseline": Row(True, "gae", (0.95, 0.95), (0.2, 0.2), "sequence", NO_KL, {}),
    "vc_ppo": Row(True, "gae", (0.95, 1), (0.2, 0.2), "sequence", NO_KL, {}),
    "vapo": Row(True, "gae", (0.95, 1), (0.2, 0.28), "token", NO_KL,
                {"length_adaptive_alpha": 0.05, "positive_nll_coef": 0.1, "positive_threshold": 0.0,
                 "samples_per_prompt": 16}),
    "evpo": Row(True, "gae", (1, 1), (0.2, 0.2), "token", REWARD_K1, {"critic_ev_threshold": 0.0}),
    "sao": Row(True, "gae", (0.95, 1), (0.3, 5.0), "token", NO_KL,
               {"length_adaptive_alpha": 1.5, "bootstrap_truncated": True, "old_logprobs": "sampler", "ratio_mask": True,
                "critic_steps": 2, "critic_first": True, "freeze_critic": "attention"}),
    "reinforce_pp": Row(False, "returns_to_go", NOT_READ, (0.2, 0.2), "sequence", REWARD_K1, WHITENED),
    "reinforce_pp_baseline": Row(False, "group_mean", NOT_READ, (0.2, 0.2), "sequence",
                                 {"kl_loss_coef": 0.01, "kl_loss_kind": "k2"}, {**WHITENED, "samples_per_prompt": 8}),
    "rloo": Row(False, "leave_one_out", NOT_READ, NO_CLIP, "sequence_sum", REWARD_K1,
                {**ONE_STEP, "samples_per_prompt": 4}),
    "remax": Row(False, "greedy_baseline", NOT_READ, NO_CLIP, "sequence_sum", REWARD_K1, ONE_STEP),
    "grpo": Row(False, "group_normalised", NOT_READ, (0.2, 0.2), "sequence",
                {"kl_loss_coef": 0.04, "kl_loss_kind": "k3"}, {"samples_per_prompt": 64}),
    "dr_grpo": Row(False, "group_mean", NOT_READ, (0.2, 0.2), "constant", NO_KL, {"samples_per_prompt": 8}),
    "dapo": Row(False, "group_normalised", NOT_READ, (0.2, 0.28), "token", NO_KL,
                {"overlong_buffer": 0.2, "drop_uniform_groups": True, "samples_per_prompt": 16}),
    "gspo": Row(False, "group_normalised", NOT_READ, (3e-4, 4e-4), "sequence", NO_KL,
                {"ratio_level": "sequence", "samples_per_prompt": 16}),
    "cispo": Row(False, "group_normalised", NOT_READ, (None, 4.0), "token", NO_KL,
                 {"surrogate": "clipped_weight", "overlong_buffer": 0.2, "drop_uniform_groups": True, "samples_per_prompt": 16}),
    "sapo": Row(False, "group_normalised", NOT_READ, (0.2, 0.2), "sequence", NO_KL,
                {"surrogate": "soft_gate", "soft_gate_positive": 1.0, "soft_gate_negative": 1.05, "samples_per_prompt": 16}),
    "gmpo": Row(False, "group_normalised", NOT_READ, (0.3297, 0.4918), "sequence", NO_KL,
                {"surrogate": "geometric_mean", "samples_per_prompt": 8}),
    "pvpo": Row(False, "reference_mean", NOT_READ, (0.2, 0.2), "sequence", NO_KL, {"samples_per_prompt": 8}),
    "a_star_po": Row(False, "optimal_value", NOT_READ, NO_CLIP, "sequence_sum", {"kl_coef": 0.001, "kl_kind": "k1"}, ONE_STEP),
    "spo": Row(False, "tracked_mean", NOT_READ, (0.2, 0.28), "token", NO_KL, WHITENED),
}  # fmt: skip


def switches_of(algorithm: Algorithm) -> dict[str, Any]:
    """Return every field, also those that a JSON without them leaves out."""
    return {name: getattr(algorithm, name) for name in Algorithm.model_fields}


def test_the_table_has_every_preset_and_every_switch() -> None:
    assert tuple(TABLE) == tuple(PRESETS) == get_args(PresetName)
    columns = {
        "advantage",
        "lambda_policy",
        "lambda_value",
        "clip_range_low",
        "clip_range_high",
        "aggregation",
    }
    assert set(OFF) | columns == set(Algorithm.model_fields) - {"preset"}
    assert not set(OFF) & columns


@every("preset", list(TABLE))
def test_a_preset_is_its_row_and_nothing_else(preset: str) -> None:
    row, algorithm = TABLE[preset], Algorithm.model_validate(preset)
    expected = {
        **OFF, **row.kl, **row.extras,
        "preset": preset, "advantage": row.advantage, "aggregation": row.aggregation,
        "clip_range_low": row.clip[0], "clip_range_high": row.clip[1],
    }  # fmt: skip
    given = switches_of(algorithm)
    lambdas = (given.pop("lambda_policy"), given.pop("lambda_value"))
    assert given == expected
    assert row.lambdas in (lambdas, NOT_READ)
    assert algorithm.reads_critic == row.critic
    assert (row.lambdas is not NOT_READ) == row.critic, "λ is read with a critic alone"


@every("preset", list(TABLE))
def test_methods_of_groups_sample_groups(preset: str) -> None:
    row = TABLE[preset]
    if row.advantage in ("leave_one_out", "group_mean", "group_normalised"):
        assert row.advantage in GROUPED
        assert row.extras["samples_per_prompt"] > 1
    else:
        assert row.advantage not in GROUPED


@every("preset", list(TABLE))
def test_a_preset_written_out_says_the_same_as_its_name(preset: str) -> None:
    whole = Algorithm.model_validate(preset)
    assert whole == Algorithm.model_validate({"preset": preset})
    assert Algorithm.model_validate(whole.model_dump()) == whole
    assert Algorithm.model_validate_json(whole.model_dump_json()) == whole


def test_what_a_critic_must_have_learned_is_a_part_of_the_algorithm() -> None:
    switches = {
        "gamma": 0.9, "kl_coef": 0.2, "kl_kind": "k3", "reward_scaling": "scale", "reward_clip": 0.8,
        "overlong_buffer": 0.1,
    }  # fmt: skip
    assert Algorithm.model_validate({"preset": "ppo", **switches}).returns == Returns(**switches)
    assert set(switches) == set(Returns.model_fields)
    assert Algorithm.model_validate("vapo").returns == Returns()
    assert Algorithm.model_validate("dapo").returns == Returns(overlong_buffer=0.2)


def test_a_trunk_that_is_shared_needs_no_critic_of_its_own() -> None:
    assert not Algorithm.model_validate({"preset": "ppo", "shared_trunk": True}).reads_critic


# -- every switch is one of its own

OTHERS: dict[str, tuple[Any, Any]] = {
    "gamma": (0.9, 0.99), "kl_coef": (0.1, 0.2), "kl_kind": ("k3", "full"), "reward_scaling": ("scale", "normalise"),
    "reward_clip": (0.8, None), "overlong_buffer": (0.5, None),
    "advantage": ("gae", "leave_one_out"), "lambda_policy": (0.5, 0.6), "length_adaptive_alpha": (1.0, None),
    "lambda_value": (0.5, 0.6), "whiten_advantages": (True, False), "normalise_advantages": (True, False),
    "advantage_clip": (0.12, None), "samples_per_prompt": (2, 3), "drop_uniform_groups": (True, False),
    "max_sampling_rounds": (1, 2), "importance_ratio": (True, False), "clip_range_low": (0.1, None),
    "clip_range_high": (0.3, None), "dual_clip": (3.0, None), "aggregation": ("constant", "token"),
    "overlong_filter": (True, False), "kl_target": (6.0, None), "kl_horizon": (100, 200), "kl_loss_coef": (0.1, 0.2),
    "kl_loss_kind": ("full", "abs"), "kl_penalty_coef": (0.5, 2.0), "kl_penalty_kind": ("k1", "k3"),
    "kl_penalty_target": (0.02, None), "trust_region_kl": (0.1, None), "trust_region_halvings": (0, 1), "epoch_kl_target": (0.02, None),
    "rollout_correction": (RolloutCorrection(action="mask", low=0.5, high=2.0), None),
    "value_clip_range": (0.5, None), "shared_trunk": (True, False), "value_coef": (1.0, 2.0),
    "entropy_coef": (0.01, 0.0), "positive_nll_coef": (0.2, 0.0), "positive_threshold": (1.0, 0.5),
    "positive_verifier": ("arithmetic", None), "ptx_coef": (0.3, 0.0),
    "gae_horizon": (1, 64), "bootstrap_truncated": (True, False),
    "critic_ev_threshold": (0.3, None), "critic_ev_hysteresis": (0.1, 0.2), "critic_blend": (True, False),
    "normalise_each_score": (True, False),
    "ratio_mask": (True, False), "ratio_mask_gradient": (True, False), "freeze_critic": ("attention", "none"),
    "policy_starts_at": (10, 1), "old_logprobs": ("sampler", "policy"), "critic_steps": (3, 4),
    "critic_first": (True, False),
    "optimal_value_beta": (0.1, 1.0), "tracker_kl_half_life": (0.1, 1.0), "tracker_memory_low": (0.5, 0.9),
    "tracker_memory_high": (0.9, 0.99),
    "surrogate": ("clipped_weight", "soft_gate"), "ratio_level": ("sequence", "token"),
    "soft_gate_positive": (0.5, 2.0), "soft_gate_negative": (0.5, 2.0), "covariance": ("clip", "kl"),
    "covariance_share": (0.1, 0.2), "covariance_low": (0.5, -1.0), "covariance_high": (2.0, 9.0),
    "covariance_kl_coef": (0.5, 2.0), "kl_loss_gradient": ("unbiased", "estimate"), "kl_credit": ("token", "response"),
    "entropy_target": (0.2, None), "entropy_step": (0.1, 0.2), "entropy_coef_max": (0.5, 2.0),
    "critic_head": (CriticHead(quantiles=16), CriticHead(ensemble=2)), "mask_agreed_share": (0.2, None),
}  # fmt: skip
"""Switch → two values, at least one of which no preset has."""

WITHOUT_SAO: dict[str, Any] = {
    "bootstrap_truncated": False, "critic_steps": 1, "critic_first": False, "freeze_critic": "none",
}  # fmt: skip
OF_A_CRITIC = ("critic_steps", "critic_first", "freeze_critic")
GAE: dict[str, Any] = {"advantage": "gae", "surrogate": "clipped"}
CLIPPED: dict[str, Any] = {"surrogate": "clipped", "ratio_level": "token"}

COMPANY: dict[str, dict[str, Any]] = {
    "kl_target": {"kl_coef": 0.1},
    "kl_penalty_target": {"kl_penalty_coef": 0.1},
    "reward_scaling": {"advantage": "returns_to_go", "surrogate": "clipped", "critic_ev_threshold": None, **WITHOUT_SAO},
    "drop_uniform_groups": {"samples_per_prompt": 2},
    "advantage": {"surrogate": "clipped", "critic_ev_threshold": None, **WITHOUT_SAO},
    "critic_ev_threshold": GAE,
    "critic_blend": {**GAE, "critic_ev_threshold": None},
    "freeze_critic": GAE,
    "policy_starts_at": GAE,
    "critic_steps": GAE,
    "critic_first": GAE,
    "shared_trunk": {**GAE, **{name: WITHOUT_SAO[name] for name in OF_A_CRITIC}},
    "gae_horizon": GAE,
    "bootstrap_truncated": GAE,
    "positive_nll_coef": {"positive_threshold": 0.25},
    "rollout_correction": {"old_logprobs": "policy"},
    "surrogate": {"importance_ratio": True, "ratio_mask": False},
    "ratio_level": {"importance_ratio": True, "ratio_mask": False, "surrogate": "clipped"},
    "covariance": {"importance_ratio": True, "ratio_mask": False, **CLIPPED},
    "ratio_mask": CLIPPED,
    "importance_ratio": CLIPPED,
    "kl_credit": CLIPPED,
    "kl_loss_gradient": {"kl_loss_kind": "k3"},
    "critic_head": {**GAE, "value_clip_range": None},
    "mask_agreed_share": {
        **GAE,
        "value_clip_range": None,
        "critic_head": CriticHead(ensemble=2),
    },
    "normalise_each_score": {
        "advantage": "group_normalised", "kl_coef": 0.0, "kl_target": None, "reward_scaling": "none", "reward_clip": None,
        "overlong_buffer": None, "whiten_advantages": False, "critic_ev_threshold": None, **WITHOUT_SAO,
    },
}  # fmt: skip
"""Switch → what must stand beside it, or it is refused."""


@every("switch", [name for name in Algorithm.model_fields if name != "preset"])
def test_a_switch_can_be_changed_in_every_preset_and_the_others_stay(switch: str) -> None:
    for preset in TABLE:
        whole = switches_of(Algorithm.model_validate(preset))
        values = [value for value in OTHERS[switch] if value != whole[switch]]
        assert values, f"{preset} has every value of the test"
        for value in values:
            changes = {**COMPANY.get(switch, {}), switch: value}
            changed = switches_of(Algorithm.model_validate({"preset": preset, **changes}))
            assert changed == {**whole, **changes}


@every("value", ["vapoo", {"preset": "vapoo"}, {"preset": ["ppo"]}, {"preset": None}, {}])
def test_a_wrong_preset_is_the_only_complaint(value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate(value)
    assert [error["loc"] for error in caught.value.errors()] == [("preset",)]


@every(
    "switches",
    [{"gamma": 1.1}, {"gamma": "1"}, {"gamma": True}, {"kl_coef": -1}, {"kl_kind": "kl"}, {"reward_scaling": True},
     {"reward_clip": 0}, {"overlong_buffer": 0}, {"overlong_buffer": 1.1}, {"advantage": "GAE"},
     {"lambda_policy": -0.1}, {"lambda_value": 1.5}, {"length_adaptive_alpha": 0}, {"advantage_clip": 0},
     {"samples_per_prompt": 0}, {"samples_per_prompt": 2.0}, {"max_sampling_rounds": 0}, {"clip_range_low": 1.5},
     {"clip_range_low": 0}, {"clip_range_high": 0}, {"dual_clip": 1}, {"aggregation": "mean"}, {"kl_target": 0},
     {"kl_horizon": 0}, {"kl_loss_coef": -0.1}, {"kl_loss_kind": "k4"}, {"kl_penalty_coef": -1},
     {"kl_penalty_kind": "k2"}, {"kl_penalty_target": 0}, {"trust_region_kl": 0}, {"trust_region_halvings": -1}, {"epoch_kl_target": 0},
     {"value_clip_range": 0}, {"value_coef": 0}, {"entropy_coef": -0.1}, {"positive_nll_coef": -0.1},
     {"positive_threshold": "0"}, {"ptx_coef": -1}, {"lamda": 1}, {"critic_ev_hysteresis": 0},
     {"critic_ev_threshold": "0"}, {"critic_blend": 1}, {"gae_horizon": 0}, {"gae_horizon": 2.0},
     {"gae_horizon": True}, {"ratio_mask": 1}, {"ratio_mask_gradient": "detach"}, {"freeze_critic": "mlp"},
     {"policy_starts_at": -1}, {"policy_starts_at": 1.0}, {"old_logprobs": "old"}, {"critic_steps": 0},
     {"critic_first": 1}, {"surrogate": "gspo"}, {"ratio_level": "response"}, {"soft_gate_positive": 0},
     {"soft_gate_negative": 0}, {"covariance": True}, {"covariance_share": 0}, {"covariance_share": 1.5},
     {"covariance_kl_coef": 0}, {"kl_loss_gradient": "biased"}, {"kl_credit": "tokens"}, {"entropy_target": 0},
     {"entropy_step": 0}, {"entropy_coef_max": 0},
     {"mask_agreed_share": 1.0}, {"mask_agreed_share": 0}],
)  # fmt: skip
def test_values_out_of_range_are_refused(switches: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate({"preset": "ppo", **switches})
    assert [error["loc"] for error in caught.value.errors()] == [tuple(switches)]


def test_a_side_of_the_clip_may_stay_open() -> None:
    algorithm = Algorithm.model_validate({"preset": "ppo", "clip_range_low": None})
    assert (algorithm.clip_range_low, algorithm.clip_range_high) == (None, 0.2)


# -- mixtures that make no sense


@every(
    ("switches", "said"),
    [
        ({"preset": "vapo", "positive_threshold": None},
         "positive_nll_coef=0.1 needs to know which responses are right; set positive_verifier or "
         "positive_threshold, or positive_nll_coef: 0"),
        ({"preset": "grpo", "kl_loss_kind": "k1"},
         "kl_loss_kind=k1 has an expected gradient of 0, so as a loss it does nothing but add noise; "
         "use k2 or full (KL(π‖ref)) or k3 (KL(ref‖π)), or kl_coef, where k1 belongs"),
        ({"preset": "vapo", "kl_target": 6.0},
         "kl_target=6 multiplies kl_coef, which is 0 and would stay so; set kl_coef, or kl_target: null"),
        ({"preset": "ppo_kl_penalty", "kl_penalty_coef": 0},
         "kl_penalty_target=0.01 multiplies kl_penalty_coef, which is 0 and would stay so; "
         "set kl_penalty_coef, or kl_penalty_target: null"),
        ({"preset": "dapo", "samples_per_prompt": 1},
         "drop_uniform_groups drops every group of samples_per_prompt=1; raise samples_per_prompt"),
        ({"preset": "rloo", "shared_trunk": True},
         "shared_trunk trains a value head, which advantage=leave_one_out does not read; "
         "use advantage: gae, or shared_trunk: false"),
        ({"preset": "grpo", "gae_horizon": 8},
         "gae_horizon=8 bootstraps from a critic's value, and advantage=group_normalised has no "
         "critic; use advantage: gae, or gae_horizon: null"),
        ({"preset": "dapo", "bootstrap_truncated": True},
         "bootstrap_truncated=true bootstraps from a critic's value, and advantage=group_normalised "
         "has no critic; use advantage: gae, or bootstrap_truncated: false"),
        ({"preset": "rloo", "freeze_critic": "attention"},
         "freeze_critic=attention is about a critic of its own, and advantage=leave_one_out has none; leave "
         "freeze_critic out"),
        ({"preset": "dapo", "critic_first": True},
         "critic_first=true is about a critic of its own, and advantage=group_normalised has none; leave critic_first "
         "out"),
        ({"preset": "ppo", "shared_trunk": True, "critic_steps": 2},
         "critic_steps=2 is about a critic of its own, and shared_trunk: true has none; leave critic_steps out"),
        ({"preset": "ppo", "shared_trunk": True, "policy_starts_at": 3},
         "policy_starts_at=3 is about a critic of its own, and shared_trunk: true has none; leave policy_starts_at out"),
        ({"preset": "rloo", "critic_blend": True},
         "critic_blend=true asks how far a critic is trusted, and advantage=leave_one_out has none; "
         "use advantage: gae, or critic_blend: false"),
        ({"preset": "evpo", "advantage": "group_mean"},
         "critic_ev_threshold=0.0 asks how far a critic is trusted, and advantage=group_mean has none; "
         "use advantage: gae, or critic_ev_threshold: null"),
        ({"preset": "evpo", "critic_blend": True},
         "critic_blend weighs the critic by its explained variance, and critic_ev_threshold=0 takes all or nothing "
         "of it; set one of them"),
    ],
)  # fmt: skip
def test_refusals(switches: dict[str, Any], said: str) -> None:
    """These switches contradict one another and are refused with a remedy."""
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate(switches)
    assert [str(error["ctx"]["error"]) for error in caught.value.errors()] == [said]


@every(
    "switches",
    [
        {"preset": "vapo", "positive_threshold": None, "positive_verifier": "arithmetic"},
        {"preset": "vapo", "positive_threshold": None, "positive_nll_coef": 0},
        {"preset": "grpo", "kl_loss_kind": "k1", "kl_loss_coef": 0},
        {"preset": "vapo", "kl_target": 6.0, "kl_coef": 0.1},
        {"preset": "ppo_kl_penalty", "kl_penalty_coef": 0, "kl_penalty_target": None},
        {"preset": "dapo", "samples_per_prompt": 1, "drop_uniform_groups": False},
        {"preset": "rloo", "shared_trunk": True, "advantage": "gae"},
        {"preset": "grpo", "gae_horizon": 8, "bootstrap_truncated": True, "advantage": "gae"},
        {"preset": "dapo", "gae_horizon": None, "bootstrap_truncated": False},
        {"preset": "evpo", "advantage": "group_mean", "critic_ev_threshold": None},
        {"preset": "evpo", "critic_blend": True, "critic_ev_threshold": None},
    ],
)
def test_the_remedies_are_remedies(switches: dict[str, Any]) -> None:
    Algorithm.model_validate(switches)
