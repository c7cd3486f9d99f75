import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.kl import PenaltyController, ProportionalController

coefs = st.floats(1e-4, 1e3)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * (1 + 0.1 * 500 / 10_000)),  # a tenth above: β grows by 0.1 · 5 %
        (5.7, 0.2 * (1 - 0.05 * 500 / 10_000)),
        (60.0, 0.2 * (1 + 0.2 * 500 / 10_000)),  # clipped at a fifth
        (0.0, 0.2 * (1 - 0.2 * 500 / 10_000)),
        (-3.0, 0.2 * (1 - 0.2 * 500 / 10_000)),  # k1 may be negative on average
    ],
)
def test_proportional_by_hand(kl, expected):
    """The proportional controller takes the steps that were worked out by hand."""
    controller = ProportionalController(coef=0.2, target=6.0, horizon=10_000)
    moved = controller.update(kl, num_sequences=500)
    assert moved.coef == pytest.approx(expected, rel=1e-12)
    assert (moved.target, moved.horizon) == (6.0, 10_000) and controller.coef == 0.2


@settings(max_examples=50)
@given(coef=coefs, target=coefs, kl=st.floats(-1e3, 1e6), share=st.floats(1e-3, 1))
def test_proportional_is_its_formula(coef, target, kl, share):
    """The proportional controller equals the formula of its paper."""
    controller = ProportionalController(coef=coef, target=target, horizon=1000)
    num_sequences = max(1, int(1000 * share))
    error = sorted([-0.2, kl / target - 1, 0.2])[1]
    expected = coef * (1 + error * num_sequences / 1000)
    assert controller.update(kl, num_sequences=num_sequences).coef == pytest.approx(expected, rel=1e-12)


def test_proportional_steers_a_policy_whose_kl_falls_with_beta_onto_its_target():
    controller = ProportionalController(coef=0.01, target=6.0, horizon=1000)
    for _ in range(400):
        controller = controller.update(3 / controller.coef, num_sequences=256)
    assert 3 / controller.coef == pytest.approx(6.0, rel=1e-3)


@pytest.mark.parametrize("num_sequences", [0, -4, 500, 501])
def test_proportional_refuses_a_step_that_could_take_all_of_beta(num_sequences):
    controller = ProportionalController(coef=0.1, target=6.0, horizon=100)
    with pytest.raises(
        ValueError, match=f"num_sequences={num_sequences} must be positive and below 5 · horizon"
    ):
        controller.update(6.0, num_sequences=num_sequences)
    assert controller.update(0.0, num_sequences=499).coef > 0


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.0301, 2.0),  # above 1.5 · 0.02: doubled
        (0.03, 1.0),  # strictly
        (0.02, 1.0),
        (0.0134, 1.0),  # 0.02/1.5 = 0.01333…
        (0.0133, 0.5),
        (-0.5, 0.5),
    ],
)
def test_penalty_by_hand(kl, expected):
    """The controller of PPO's penalty takes the steps that were worked out by hand."""
    controller = PenaltyController(coef=1.0, target=0.02)
    assert controller.update(kl).coef == expected
    assert controller.coef == 1.0


@pytest.mark.parametrize("target", [3.0, 1.5, 0.75])
def test_penalty_stays_on_its_two_bounds(target):
    controller = PenaltyController(coef=1.0, target=target)
    for bound in (1.5 * target, target / 1.5):
        assert controller.update(bound) == controller
    assert controller.update(math.nextafter(1.5 * target, math.inf)).coef == 2.0
    assert controller.update(math.nextafter(target / 1.5, 0)).coef == 0.5


def test_beta_neither_dies_nor_overflows_however_long_it_moves_one_way():
    penalty = PenaltyController(coef=1.0, target=1.0)
    for kl in (0.0, 10.0):
        moved = penalty
        for _ in range(2500):
            moved = moved.update(kl)
        assert 0 < moved.coef < math.inf
        assert moved.update(10.0 - kl).coef != moved.coef  # the coefficient can rise again
    proportional = ProportionalController(coef=1e-307, target=1.0, horizon=1)
    for _ in range(100):
        proportional = proportional.update(0.0, num_sequences=4)
    assert proportional.coef > 0


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf])
def test_settings_that_steer_nothing_are_refused_by_name(bad):
    for kind, settings_of_it in (
        (ProportionalController, {"coef": 0.1, "target": 6.0, "horizon": 100.0}),
        (PenaltyController, {"coef": 0.1, "target": 0.01}),
    ):
        for name in settings_of_it:
            with pytest.raises(ValueError, match=f"{name}={bad} is not a positive, finite number"):
                kind(**{**settings_of_it, name: bad})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match=f"kl={bad} is not finite"):
        ProportionalController(coef=0.1, target=6.0, horizon=100).update(bad, num_sequences=8)
    with pytest.raises(ValueError, match=f"kl={bad} is not finite"):
        PenaltyController(coef=0.1, target=0.01).update(bad)


def test_a_controller_is_a_value():
    controller = PenaltyController(coef=0.1, target=0.01)
    with pytest.raises(dataclasses.FrozenInstanceError):
        controller.coef = 0.2
