"""A switch that a recipe sets and nothing reads gives a warning, and one that something reads gives none."""

from typing import Any, get_args

from tests.support.every import every
from vantage.schemas.checks.unread_switches import unread_switches
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.presets import PresetName


def unread(**switches: Any) -> list[str]:
    return [sentence.partition(":")[0] for sentence in unread_switches(Algorithm(**switches))]


@every("preset", get_args(PresetName))
def test_what_a_preset_sets_is_not_told(preset: str) -> None:
    assert unread(preset=preset) == []


@every(
    "switch, value, without, reader",
    [
        ("lambda_policy", 0.5, {"preset": "grpo"}, {"preset": "ppo"}),
        ("lambda_policy", 0.5, {"preset": "vapo"}, {"preset": "vc_ppo"}),
        ("lambda_value", 0.5, {"preset": "remax"}, {"preset": "vapo"}),
        ("length_adaptive_alpha", 1.0, {"preset": "dapo"}, {"preset": "ppo"}),
        ("value_clip_range", 0.3, {"preset": "rloo"}, {"preset": "vapo"}),
        ("gamma", 0.9, {"preset": "dr_grpo"}, {"preset": "reinforce_pp"}),
        ("clip_range_low", 0.3, {"preset": "a2c"}, {"preset": "ppo"}),
        ("clip_range_high", 0.3, {"preset": "rloo"}, {"preset": "dapo"}),
        ("dual_clip", 3.0, {"preset": "remax"}, {"preset": "ppo"}),
        ("value_coef", 0.7, {"preset": "ppo"}, {"preset": "ppo", "shared_trunk": True}),
        ("max_sampling_rounds", 3, {"preset": "grpo"}, {"preset": "dapo"}),
        ("positive_threshold", 0.5, {"preset": "ppo"}, {"preset": "vapo"}),
        ("positive_threshold", 0.5, {"preset": "vapo", "positive_verifier": "arithmetic"}, {"preset": "vapo"}),
        ("positive_verifier", "arithmetic", {"preset": "ppo"}, {"preset": "vapo"}),
        ("kl_kind", "k2", {"preset": "vapo"}, {"preset": "ppo"}),
        ("kl_horizon", 500, {"preset": "ppo"}, {"preset": "ppo", "kl_target": 6.0}),
        ("kl_loss_kind", "full", {"preset": "ppo"}, {"preset": "grpo"}),
        ("kl_penalty_kind", "k1", {"preset": "ppo"}, {"preset": "ppo_kl_penalty"}),
        ("lambda_policy", 0.5, {"preset": "ppo", "gae_horizon": 1}, {"preset": "ppo", "gae_horizon": 2}),
        ("lambda_value", 0.5, {"preset": "ppo", "gae_horizon": 1}, {"preset": "ppo", "gae_horizon": 2}),
        ("length_adaptive_alpha", 1.0, {"preset": "vapo", "gae_horizon": 1}, {"preset": "vapo", "gae_horizon": 2}),
        ("critic_ev_hysteresis", 0.1, {"preset": "ppo"}, {"preset": "evpo"}),
        ("critic_ev_hysteresis", 0.1, {"preset": "rloo"}, {"preset": "evpo"}),
        ("ratio_mask", True, {"preset": "a2c"}, {"preset": "ppo"}),
        ("ratio_mask_gradient", True, {"preset": "ppo"}, {"preset": "ppo", "ratio_mask": True}),
        ("dual_clip", 3.0, {"preset": "ppo", "ratio_mask": True}, {"preset": "ppo"}),
        ("trust_region_halvings", 1, {"preset": "ppo"}, {"preset": "ppo", "trust_region_kl": 0.02}),
        ("soft_gate_positive", 2.0, {"preset": "ppo"}, {"preset": "ppo", "surrogate": "soft_gate"}),
        ("soft_gate_negative", 2.0, {"preset": "ppo"}, {"preset": "ppo", "surrogate": "soft_gate"}),
        ("clip_range_low", 0.1, {"preset": "ppo", "surrogate": "soft_gate"}, {"preset": "ppo", "surrogate": "clipped_weight"}),
        ("clip_range_high", 0.1, {"preset": "ppo", "surrogate": "soft_gate"}, {"preset": "grpo", "surrogate": "geometric_mean"}),
        ("dual_clip", 3.0, {"preset": "ppo", "surrogate": "clipped_weight"}, {"preset": "ppo", "ratio_level": "sequence"}),
        ("covariance_share", 0.1, {"preset": "ppo"}, {"preset": "ppo", "covariance": "kl"}),
        ("covariance_low", 0.1, {"preset": "ppo", "covariance": "kl"}, {"preset": "ppo", "covariance": "clip"}),
        ("covariance_high", 9.0, {"preset": "ppo", "covariance": "kl"}, {"preset": "ppo", "covariance": "clip"}),
        ("covariance_kl_coef", 0.1, {"preset": "ppo", "covariance": "clip"}, {"preset": "ppo", "covariance": "kl"}),
        ("kl_loss_gradient", "unbiased", {"preset": "ppo"}, {"preset": "grpo"}),
        ("kl_credit", "token", {"preset": "grpo"}, {"preset": "grpo", "kl_coef": 0.1}),
        ("kl_credit", "token", {"preset": "ppo"}, {"preset": "rloo"}),
        ("entropy_step", 0.1, {"preset": "ppo"}, {"preset": "ppo", "entropy_target": 0.2}),
        ("entropy_coef_max", 0.1, {"preset": "ppo"}, {"preset": "ppo", "entropy_target": 0.2}),
    ],
)  # fmt: skip
def test_it_is_told_where_nothing_reads_it(
    switch: str, value: Any, without: dict[str, Any], reader: dict[str, Any]
) -> None:
    """The switch gives a warning where nothing reads it, and none where something does."""
    assert switch in unread(**without, **{switch: value})
    assert switch not in unread(**reader, **{switch: value})


def test_the_sentence_has_value_reason_and_remedy() -> None:
    assert list(unread_switches(Algorithm(preset="rloo", dual_clip=3.0))) == [
        "dual_clip: 3 is not read without a ratio to clip; set importance_ratio: true, or leave dual_clip out"
    ]
    assert list(unread_switches(Algorithm(preset="a2c", ratio_mask=True))) == [
        "ratio_mask: true is not read without a ratio to clip; set importance_ratio: true, or leave ratio_mask out"
    ]
    assert list(unread_switches(Algorithm(preset="dr_grpo", gamma=0.99))) == [
        "gamma: 0.99 is not read by advantage=group_mean, which compares whole responses; "
        "set advantage: gae, or leave gamma out"
    ]
