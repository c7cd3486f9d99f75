"""What is allowed but warned against: each warning appears for its cause and for nothing else."""

from typing import Any

import pytest

from schemas.cautions import warnings
from schemas.recipe import Recipe


def warned(plain: dict[str, Any]) -> list[str]:
    return warnings(Recipe.model_validate(plain))


@pytest.fixture
def plain(plain: dict[str, Any]) -> dict[str, Any]:
    """The small recipe with responses long enough for the preset's α."""
    return {**plain, "generation": {"max_response_tokens": 512}}


def test_a_sound_recipe_has_none(plain: dict[str, Any]) -> None:
    assert warned(plain) == []


def test_what_no_stage_reads(plain: dict[str, Any]) -> None:
    plain["data"]["spare"] = plain["data"]["demos"]
    plain["rewards"]["spare"] = plain["rewards"]["main"]
    assert warned(plain) == ["data.spare: no stage reads it", "rewards.spare: no stage reads it"]


@pytest.mark.parametrize(
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
    (found,) = warned(plain)
    assert found.startswith("stages.policy.critic: a reward model scores unfinished text low")
    assert "arXiv 2503.01491" in found


def test_a_critic_of_another_policy(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["init"] = "model"
    assert warned(plain) == [
        "stages.policy.init: 'model' is not the policy whose responses the critic 'value' was pretrained on ('sft')"
    ]


def test_a_gated_critic_of_an_ungated_reward_model(plain: dict[str, Any]) -> None:
    del plain["stages"]["reward"]["gate"]
    assert warned(plain) == [
        "stages.value.gate: scores of a reward model at chance level can be predicted well too; "
        "give stages.reward a gate on pair_accuracy"
    ]
    del plain["stages"]["value"]["gate"]
    assert warned(plain) == []


def test_a_threshold_on_scores_without_a_zero(plain: dict[str, Any]) -> None:
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


def test_a_lambda_that_is_not_read(plain: dict[str, Any]) -> None:
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", "lambda_policy": 0.9}
    assert warned(plain) == [
        "stages.policy.algorithm.lambda_policy: 0.9 is not read while length_adaptive_alpha is set; "
        "set length_adaptive_alpha: null"
    ]
    plain["stages"]["policy"]["algorithm"]["length_adaptive_alpha"] = None
    assert warned(plain) == []


def test_several_steps_without_a_clip(plain: dict[str, Any]) -> None:
    open_ended = {"preset": "vapo", "clip_range_low": None, "clip_range_high": None}
    plain["stages"]["policy"] |= {
        "algorithm": open_ended,
        "batch_size": 64,
        "minibatch_size": 32,
        "epochs": 3,
    }
    (found,) = warned(plain)
    assert found.startswith(
        "stages.policy.algorithm: the ratio is not clipped, but 6 optimiser steps are taken"
    )
    plain["stages"]["policy"] |= {"batch_size": 64, "minibatch_size": 64, "epochs": 1}
    assert warned(plain) == []


def test_a_comparison_with_itself(plain: dict[str, Any]) -> None:
    plain["stages"]["evaluation"]["baseline"] = "policy"
    assert warned(plain) == ["stages.evaluation.baseline: 'policy' is compared with itself"]


def test_an_alias_held_back_by_a_gate_that_is_not_about_it(plain: dict[str, Any]) -> None:
    plain["publish"][0]["after"] = "reward"
    assert warned(plain) == [
        "publish.0.after: 'reward' does not read 'policy', so its gate says nothing about it"
    ]
    plain["publish"][0] = {"stage": "sft", "registered_model": "m", "alias": "a", "after": "reward"}
    assert warned(plain) == []
