"""The presets of policy optimisation: each method as a set of values of the switches in ``vantage.schemas.recipe.algorithm``."""

from typing import Any, Literal

PresetName = Literal[
    "policy_gradient",
    "a2c",
    "ppo",
    "ppo_kl_penalty",
    "ppo_max",
    "ppo_max_scaling",
    "ppo_max_normalised",
    "ppo_vapo_baseline",
    "vc_ppo",
    "vapo",
    "evpo",
    "sao",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "remax",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "pvpo",
    "a_star_po",
    "spo",
]

_REWARD_KL = {"kl_coef": 0.05}  # arXiv 2307.04964; where another source leaves it open, inferred
_NO_RATIO = {
    "importance_ratio": False,
    "clip_range_low": None,
    "clip_range_high": None,
    "aggregation": "sequence_sum",
}
_DECOUPLED = {"lambda_value": 1.0}

PRESETS: dict[str, dict[str, Any]] = {
    # Williams 1992. `advantage: gae, lambda_policy: 1` subtracts a state baseline.
    "policy_gradient": {**_REWARD_KL, **_NO_RATIO, "advantage": "returns_to_go"},
    # arXiv 1602.01783, synchronous
    "a2c": {**_REWARD_KL, **_NO_RATIO, "aggregation": "token", "lambda_policy": 0.0, "lambda_value": 0.0},
    # arXiv 1707.06347 with InstructGPT's reward (arXiv 2203.02155)
    "ppo": {**_REWARD_KL, "whiten_advantages": True, "value_clip_range": 0.2},
    # arXiv 1707.06347 §4: β from 1, target 0.01, the best of its three
    "ppo_kl_penalty": {
        **_REWARD_KL,
        "whiten_advantages": True,
        "clip_range_low": None,
        "clip_range_high": None,
        "kl_penalty_coef": 1.0,
        "kl_penalty_target": 0.01,
    },
    # arXiv 2307.04964: fig. 5 and §5.4 (no advantage clip), then the two mixtures of its appendix B
    "ppo_max": {
        **_REWARD_KL,
        "reward_scaling": "normalise",
        "reward_clip": 0.3,
        "value_clip_range": 0.2,
        "ptx_coef": 0.1,  # inferred
    },
    "ppo_max_scaling": {**_REWARD_KL, "reward_scaling": "scale", "value_clip_range": 0.2},
    "ppo_max_normalised": {
        **_REWARD_KL,
        "reward_scaling": "normalise",
        "reward_clip": 0.3,
        "normalise_advantages": True,
        "advantage_clip": 0.5,
    },
    # arXiv 2504.05118's comparison
    "ppo_vapo_baseline": {"aggregation": "sequence"},
    # arXiv 2503.01491: decoupled GAE and a pretrained critic; it leaves clip and aggregation open: inferred
    "vc_ppo": {**_DECOUPLED, "aggregation": "sequence"},
    # arXiv 2504.05118: VC-PPO, length-adaptive λ, clip-higher, token loss, positive examples, groups of 16
    "vapo": {
        **_DECOUPLED,
        "length_adaptive_alpha": 0.05,
        "clip_range_high": 0.28,
        "positive_nll_coef": 0.1,
        "positive_threshold": 0.0,  # inferred: the paper has a verifier; above 0 is right for it and for centred scores
        "samples_per_prompt": 16,
    },
    # arXiv 2604.19485, of its abstract and its public code: PPO whose critic counts while its explained variance is
    # positive. λ = 1 for both, at which that is the boundary where a critic stops lowering the variance: inferred
    "evpo": {**_REWARD_KL, **_DECOUPLED, "lambda_policy": 1.0, "critic_ev_threshold": 0.0},
    # arXiv 2607.07508, of its abstract and its public code: one response to a prompt, a pretrained critic in the place of
    # a group. ε is that for mathematics; for code 0.8 and 3. Without a pretrained critic the policy waits 10 iterations
    "sao": {
        **_DECOUPLED,
        "length_adaptive_alpha": 1.5,
        "bootstrap_truncated": True,
        "old_logprobs": "sampler",
        "ratio_mask": True,
        "clip_range_low": 0.3,
        "clip_range_high": 5.0,
        "critic_steps": 2,
        "critic_first": True,
        "freeze_critic": "attention",
    },
    # arXiv 2501.03262: eq. 1, then eq. 6-8
    "reinforce_pp": {
        **_REWARD_KL,
        "advantage": "returns_to_go",
        "whiten_advantages": True,
        "aggregation": "sequence",
    },
    "reinforce_pp_baseline": {
        "advantage": "group_mean",
        "whiten_advantages": True,
        "aggregation": "sequence",
        "kl_loss_coef": 0.01,  # inferred
        "samples_per_prompt": 8,  # inferred
    },
    # arXiv 2402.14740
    "rloo": {**_REWARD_KL, **_NO_RATIO, "advantage": "leave_one_out", "samples_per_prompt": 4},
    # arXiv 2310.10505
    "remax": {**_REWARD_KL, **_NO_RATIO, "advantage": "greedy_baseline"},
    # arXiv 2402.03300
    "grpo": {
        "advantage": "group_normalised",
        "aggregation": "sequence",
        "kl_loss_coef": 0.04,
        "kl_loss_kind": "k3",
        "samples_per_prompt": 64,
    },
    # arXiv 2503.20783
    "dr_grpo": {"advantage": "group_mean", "aggregation": "constant", "samples_per_prompt": 8},
    # arXiv 2503.14476
    "dapo": {
        "advantage": "group_normalised",
        "clip_range_high": 0.28,
        "overlong_buffer": 0.2,
        "drop_uniform_groups": True,
        "samples_per_prompt": 16,
    },
    # arXiv 2507.18071: the ranges of its §5.1, without a KL. Groups: inferred from verl's example of it
    "gspo": {
        "advantage": "group_normalised",
        "aggregation": "sequence",
        "ratio_level": "sequence",
        "clip_range_low": 3e-4,
        "clip_range_high": 4e-4,
        "samples_per_prompt": 16,
    },
    # arXiv 2506.13585: DAPO's sampling and shaping, and weights without a lower bound. Its upper bound is not published; a
    # weight of at most 5 is TRL's for ScaleRL (arXiv 2510.13786): inferred
    "cispo": {
        "advantage": "group_normalised",
        "surrogate": "clipped_weight",
        "clip_range_low": None,
        "clip_range_high": 4.0,
        "overlong_buffer": 0.2,
        "drop_uniform_groups": True,
        "samples_per_prompt": 16,
    },
    # arXiv 2511.20347: its two temperatures. Groups: inferred from GSPO, which it is compared with
    "sapo": {
        "advantage": "group_normalised",
        "aggregation": "sequence",
        "surrogate": "soft_gate",
        "soft_gate_positive": 1.0,
        "soft_gate_negative": 1.05,
        "samples_per_prompt": 16,
    },
    # arXiv 2507.20673 and its authors' script: ratios within e^±0.4, groups of 8, no KL
    "gmpo": {
        "advantage": "group_normalised",
        "aggregation": "sequence",
        "surrogate": "geometric_mean",
        "clip_range_low": 0.3297,
        "clip_range_high": 0.4918,
        "samples_per_prompt": 8,
    },
    # arXiv 2508.21104: GRPO whose baseline is the reference's own mean score. Loss, clip and number: inferred from GRPO's
    "pvpo": {"advantage": "reference_mean", "aggregation": "sequence", "samples_per_prompt": 8},
    # arXiv 2505.20686: its regression of β2·log(π/π_ref) on R − V* has, on fresh responses, the gradient of this surrogate
    # times 2·β2. β1 = 1/2, β2 = 1e-3
    "a_star_po": {**_NO_RATIO, "advantage": "optimal_value", "kl_coef": 1e-3},
    # arXiv 2509.13232, less its sampling of uncertain prompts. Clip and aggregation: inferred
    "spo": {"advantage": "tracked_mean", "whiten_advantages": True, "clip_range_high": 0.28},
}
"""Preset → its differences from the defaults of ``Algorithm``."""
