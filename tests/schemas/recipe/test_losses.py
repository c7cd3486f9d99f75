"""Combinations of the switches of ``vantage.schemas.recipe.losses`` that are refused, and their nearest relatives that are not."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.every import every
from vantage.schemas.checks.algorithm_warnings import _combinations as combinations
from vantage.schemas.recipe.algorithm import Algorithm


@every(
    ("switches", "said"),
    [
        ({"preset": "rloo", "surrogate": "soft_gate"},
         "surrogate=soft_gate bounds the ratio π/π_old, and importance_ratio=false has none; set importance_ratio: true, or "
         "surrogate: clipped"),
        ({"preset": "remax", "ratio_level": "sequence"},
         "ratio_level=sequence bounds the ratio π/π_old, and importance_ratio=false has none; set importance_ratio: true, or "
         "ratio_level: token"),
        ({"preset": "sao", "surrogate": "clipped_weight"},
         "surrogate=clipped_weight and ratio_mask both decide what an off-policy token weighs; set ratio_mask: false, or "
         "surrogate: clipped"),
        ({"preset": "grpo", "surrogate": "geometric_mean", "ratio_level": "sequence"},
         "surrogate=geometric_mean takes the mean over the response itself, of ratios that are clipped before; set ratio_level: "
         "token"),
        ({"preset": "ppo", "surrogate": "geometric_mean"},
         "surrogate=geometric_mean has one ratio for a response, and advantage=gae gives each token its own advantage; use "
         "advantage: group_normalised or another that compares whole responses, with kl_credit: response"),
        ({"preset": "dr_grpo", "surrogate": "geometric_mean", "kl_credit": "token", "kl_coef": 0.1},
         "surrogate=geometric_mean has one ratio for a response, and kl_credit=token gives each token its own advantage; use "
         "advantage: group_normalised or another that compares whole responses, with kl_credit: response"),
        ({"preset": "grpo", "covariance": "clip", "surrogate": "soft_gate"},
         "covariance=clip selects tokens of the clipped surrogate, and surrogate=soft_gate is another loss; set surrogate: "
         "clipped, or covariance: none"),
        ({"preset": "sao", "covariance": "kl"},
         "covariance=kl selects tokens of the clipped surrogate, and ratio_mask=true is another loss; set ratio_mask: false, or "
         "covariance: none"),
        ({"preset": "rloo", "covariance": "clip"},
         "covariance=clip selects tokens of the clipped surrogate, and importance_ratio=false is another loss; set "
         "importance_ratio: true, or covariance: none"),
        ({"preset": "grpo", "covariance": "kl", "ratio_level": "sequence"},
         "covariance=kl selects tokens of the clipped surrogate, and ratio_level=sequence is another loss; set ratio_level: "
         "token, or covariance: none"),
        ({"preset": "grpo", "covariance": "clip", "covariance_low": 5.0},
         "covariance_low=5 is not below covariance_high=5, so that no token lies between; lower it"),
        ({"preset": "grpo", "kl_loss_gradient": "unbiased", "kl_loss_kind": "k2"},
         "kl_loss_gradient=unbiased needs an estimator whose expectation is the KL, and kl_loss_kind=k2 is biased; use "
         "kl_loss_kind: k3, or kl_loss_gradient: estimate"),
        ({"preset": "grpo", "kl_loss_gradient": "unbiased", "kl_loss_kind": "full"},
         "kl_loss_gradient=unbiased needs an estimator whose expectation is the KL, and kl_loss_kind=full is exact already; use "
         "kl_loss_kind: k3, or kl_loss_gradient: estimate"),
        ({"preset": "grpo", "entropy_target": 0.2, "entropy_coef": 0.6, "entropy_coef_max": 0.5},
         "entropy_coef=0.6 is where the coefficient begins, and is above entropy_coef_max=0.5; lower it"),
    ],
)  # fmt: skip
def test_refusals(switches: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate(switches)
    assert [str(error["ctx"]["error"]) for error in caught.value.errors()] == [said]


@every(
    "switches",
    [
        {"preset": "rloo", "surrogate": "soft_gate", "importance_ratio": True},
        {"preset": "grpo", "ratio_level": "sequence", "surrogate": "soft_gate"},
        {"preset": "grpo", "ratio_level": "sequence", "surrogate": "clipped_weight", "clip_range_low": None},
        {"preset": "dapo", "ratio_level": "sequence", "dual_clip": 3.0},
        {"preset": "ppo", "ratio_level": "sequence"},
        {"preset": "pvpo", "surrogate": "geometric_mean"},
        {"preset": "sao", "covariance": "kl", "ratio_mask": False},
        {"preset": "grpo", "covariance": "kl", "covariance_low": 5.0},
        {"preset": "grpo", "kl_loss_kind": "k1", "kl_loss_gradient": "unbiased"},
        {"preset": "grpo", "kl_loss_kind": "k2", "kl_loss_gradient": "unbiased", "kl_loss_coef": 0.0},
        {"preset": "grpo", "entropy_coef": 2.0},
    ],
)
def test_what_is_allowed(switches: dict[str, Any]) -> None:
    Algorithm.model_validate(switches)


def test_a_recipe_without_these_switches_keeps_its_json() -> None:
    assert not {
        "surrogate", "ratio_level", "covariance", "kl_credit", "kl_loss_gradient", "entropy_target", "entropy_step",
        "covariance_share", "soft_gate_positive",
    } & Algorithm.model_validate("grpo").model_dump(mode="json").keys()  # fmt: skip


def warned(**switches: Any) -> list[str]:
    return [warning.partition(":")[0] for warning in combinations(Algorithm(**switches))]


def test_a_ratio_of_the_response_has_narrow_ranges_and_equal_responses() -> None:
    narrow = {"clip_range_low": 3e-4, "clip_range_high": 4e-4}
    assert warned(preset="grpo", ratio_level="sequence", **narrow) == []
    assert warned(preset="grpo", ratio_level="sequence") == ["clip_range_high"]
    assert warned(preset="dapo", ratio_level="sequence", **narrow) == ["aggregation"]
    assert warned(preset="grpo") == []
