"""Switches, and the presets as the papers have them (the table of values is written out here once more)."""

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.algorithm import PRESETS, Algorithm

SWITCHES = (
    "gamma", "lambda_policy", "length_adaptive_alpha", "lambda_value", "whiten_advantages",
    "clip_range_low", "clip_range_high", "aggregation", "value_clip_range", "kl_coef", "entropy_coef",
    "positive_nll_coef", "positive_threshold", "positive_verifier", "samples_per_prompt",
)  # fmt: skip
TABLE: dict[str, tuple[Any, ...]] = {
    "ppo": (1, 0.95, None, 0.95, True, 0.2, 0.2, "token", 0.2, 0.05, 0, 0, None, None, 1),
    "vc_ppo": (1, 0.95, None, 1, False, 0.2, 0.2, "sequence", None, 0, 0, 0, None, None, 1),
    "vapo": (1, 0.95, 0.05, 1, False, 0.2, 0.28, "token", None, 0, 0, 0.1, 0, None, 16),
}


@pytest.mark.parametrize("preset", list(TABLE))
def test_presets_have_the_values_of_their_papers(preset: str) -> None:
    algorithm = Algorithm.model_validate(preset)
    assert tuple(getattr(algorithm, switch) for switch in SWITCHES) == TABLE[preset]


def test_every_preset_sets_every_switch() -> None:
    assert set(PRESETS) == set(TABLE)
    for values in PRESETS.values():
        assert set(values) == set(SWITCHES) == set(Algorithm.model_fields) - {"preset"}


def test_a_switch_differs_and_the_others_stay() -> None:
    changed = Algorithm.model_validate({"preset": "vapo", "clip_range_high": 0.2})
    whole = Algorithm.model_validate("vapo")
    assert changed == whole.model_copy(update={"clip_range_high": 0.2})


def test_a_mixture_written_out_says_the_same_as_its_preset() -> None:
    whole = Algorithm.model_validate("vapo")
    assert Algorithm.model_validate(whole.model_dump()) == whole
    assert Algorithm.model_validate_json(whole.model_dump_json()) == whole


@pytest.mark.parametrize("value", ["vapoo", {"preset": "vapoo"}, {"preset": ["ppo"]}, {"preset": None}, {}])
def test_a_wrong_preset_is_the_only_complaint(value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate(value)
    assert [error["loc"] for error in caught.value.errors()] == [("preset",)]


@pytest.mark.parametrize(
    "switches",
    [{"gamma": 1.1}, {"lambda_policy": -0.1}, {"length_adaptive_alpha": 0}, {"clip_range_low": 1.5}, {"clip_range_low": 0}, {"clip_range_high": 0},
     {"kl_coef": -1}, {"samples_per_prompt": 0}, {"samples_per_prompt": 2.0}, {"aggregation": "mean"},
     {"value_clip_range": 0}, {"gamma": "1"}, {"gamma": True}, {"lamda": 1}],
)  # fmt: skip
def test_values_out_of_range_are_refused(switches: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate({"preset": "ppo", **switches})
    assert [error["loc"] for error in caught.value.errors()] == [tuple(switches)]


def test_a_side_of_the_clip_may_stay_open() -> None:
    algorithm = Algorithm.model_validate({"preset": "ppo", "clip_range_low": None, "clip_range_high": None})
    assert (algorithm.clip_range_low, algorithm.clip_range_high) == (None, None)


def test_positive_examples_need_a_rule() -> None:
    with pytest.raises(
        ValidationError, match="needs to know which responses are right; set positive_verifier"
    ):
        Algorithm.model_validate({"preset": "vapo", "positive_threshold": None})
    Algorithm.model_validate(
        {"preset": "vapo", "positive_threshold": None, "positive_verifier": "arithmetic"}
    )
    Algorithm.model_validate({"preset": "vapo", "positive_threshold": None, "positive_nll_coef": 0})
