"""The entropy coefficient is changed between updates by some measurements, and left as it is by others."""

import math
from dataclasses import replace

import pytest

from vantage.schemas.recipe.algorithm import Algorithm
from vantage.tasks.updates.policy_losses import Coefficients
from vantage.tasks.updates.policy_state import (
    AdaptingPolicyState,
    PolicyState,
    coefficients,
    with_updated_entropy_coef,
)

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


def test_the_next_update_has_the_coefficients_of_the_state() -> None:
    """An adapting coefficient applies only while the entropy is below its target; a fixed one always does."""
    fixed = Algorithm.model_validate({"preset": "grpo", "entropy_coef": 0.2})
    state = PolicyState(kl_penalty_coef=0.3)
    assert coefficients(state, fixed) == Coefficients(kl_penalty=0.3, entropy=0.2)
    for is_low, applied in ((True, 0.1), (False, 0.0)):
        adapting = replace(STATE, kl_penalty_coef=0.4, entropy_is_low=is_low)
        assert coefficients(adapting, ADAPTING) == Coefficients(kl_penalty=0.4, entropy=applied)
