"""Wrong combinations of the switches of ``vantage.schemas.recipe.losses`` are refused, and the nearest right ones are not."""

import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.support.every import every
from tests.support.packages import ROOT
from vantage.schemas.checks.algorithm_warnings import combination_warnings
from vantage.schemas.checks.unread_switches import unread_switches
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.presets import PRESETS


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
    """These switches of losses contradict one another and are refused with a remedy."""
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
    """These combinations, the nearest to refused ones, are accepted."""
    Algorithm.model_validate(switches)


def test_a_recipe_without_these_switches_keeps_its_json() -> None:
    assert not {
        "surrogate", "ratio_level", "covariance", "kl_credit", "kl_loss_gradient", "entropy_target", "entropy_step",
        "covariance_share", "soft_gate_positive",
    } & Algorithm.model_validate("grpo").model_dump(mode="json").keys()  # fmt: skip


def warned(**switches: Any) -> list[str]:
    return [warning.partition(":")[0] for warning in combination_warnings(Algorithm(**switches))]


def test_a_ratio_of_the_response_has_narrow_ranges_and_equal_responses() -> None:
    narrow = {"clip_range_low": 3e-4, "clip_range_high": 4e-4}
    assert warned(preset="grpo", ratio_level="sequence", **narrow) == []
    assert warned(preset="grpo", ratio_level="sequence") == ["clip_range_high"]
    assert warned(preset="dapo", ratio_level="sequence", **narrow) == ["aggregation"]
    assert warned(preset="grpo") == []


def switches_of_methods() -> dict[str, dict[str, Any]]:
    """Return each method's switches from the table of docs/algorithms.md, with its preset, or ``grpo`` without one."""
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = page.partition("| method | preset, and switches |")[2].partition("\n\n")[0]
    methods = {}
    for row in table.splitlines()[2:]:
        method, switches, _ = row.strip("| ").split(" | ", maxsplit=2)
        words = re.findall("`([^`]+)`", switches)
        preset = next((word for word in words if word in PRESETS), "grpo")
        methods[method] = {"preset": preset} | {
            name: value for word in words if ": " in word for name, value in yaml.safe_load(word).items()
        }
    return methods


def test_the_methods_as_shown_load_and_every_switch_of_theirs_is_read() -> None:
    methods = switches_of_methods()
    assert len(methods) == 10
    for method, switches in methods.items():
        algorithm = Algorithm.model_validate(switches)
        assert len(switches) > 1, method
        assert list(unread_switches(algorithm)) == [], method
        assert list(combination_warnings(algorithm)) == [], method
    named = {"GSPO": "gspo", "CISPO": "cispo", "SAPO": "sapo", "GMPO": "gmpo"}
    for method, preset in named.items():
        shown = next(switches for name, switches in methods.items() if name.startswith(method))
        assert Algorithm.model_validate(shown) == Algorithm.model_validate(preset), method
