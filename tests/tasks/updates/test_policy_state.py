"""The entropy coefficient is changed between updates by some measurements, and left as it is by others."""

import math

import pytest

from vantage.schemas.recipe.algorithm import Algorithm
from vantage.tasks.updates.policy_state import AdaptingPolicyState, PolicyState, with_updated_entropy_coef

ADAPTING = Algorithm.model_validate(
    {
        "preset": "grpo",
        "entropy_coef": 0.1,
        "entropy_target": 1.0,
        "entropy_step": 0.25,
        "entropy_coef_max": 0.3,
    }
)
STATE = AdaptingPolicyState(entropy_coef=0.1, entropy_is_low=False)


@pytest.mark.parametrize(
    ("entropy", "coef", "is_low"), [(0.5, 0.3, True), (1.0, 0.0, False), (2.0, 0.0, False)]
)
def test_the_coefficient_follows_the_entropy_within_its_range(
    entropy: float, coef: float, is_low: bool
) -> None:
    moved = with_updated_entropy_coef(STATE, entropy, ADAPTING)
    assert isinstance(moved, AdaptingPolicyState)
    assert (moved.entropy_coef, moved.entropy_is_low) == (coef, is_low)


@pytest.mark.parametrize("entropy", [None, math.nan, math.inf, -math.inf])
def test_an_entropy_that_is_not_finite_moves_nothing(entropy: float | None) -> None:
    """A stage may tolerate an update whose loss is not finite, and one that learns from nothing measures none."""
    assert with_updated_entropy_coef(STATE, entropy, ADAPTING) is STATE


def test_a_fixed_coefficient_is_no_part_of_the_state() -> None:
    state, fixed = PolicyState(), Algorithm.model_validate({"preset": "grpo", "entropy_coef": 0.1})
    assert with_updated_entropy_coef(state, 0.5, fixed) is state
