"""The controller of the entropy coefficient takes the steps that were worked out by hand, and refuses bad settings."""

import math

import pytest

from vantage.algorithms.entropy_control import EntropyController

FIRST = EntropyController(0.01, is_low=True, target=0.2, step=0.005, highest=0.018)


def test_a_few_steps_by_hand() -> None:
    applied, coefs, controller = [FIRST.applied], [FIRST.coef], FIRST
    for entropy in (0.1, 0.1, 0.3, 0.2, 0.1, 0.4, 0.4, 0.4, 0.4):
        controller = controller.update(entropy)
        coefs.append(controller.coef)
        applied.append(controller.applied)
    assert coefs == pytest.approx([0.01, 0.015, 0.018, 0.013, 0.008, 0.013, 0.008, 0.003, 0.0, 0.0])
    assert applied == pytest.approx([0.01, 0.015, 0.018, 0.0, 0.0, 0.013, 0.0, 0.0, 0.0, 0.0])


def test_what_is_refused() -> None:
    """Wrong settings of the controller are refused by message."""
    with pytest.raises(ValueError, match="target=0 is not a positive, finite number"):
        EntropyController(0.0, is_low=True, target=0, step=0.1, highest=1.0)
    with pytest.raises(ValueError, match="step=inf is not a positive, finite number"):
        EntropyController(0.0, is_low=True, target=0.2, step=math.inf, highest=1.0)
    with pytest.raises(ValueError, match="coef=2.0 is not between 0 and highest=1.0"):
        EntropyController(2.0, is_low=True, target=0.2, step=0.1, highest=1.0)
    with pytest.raises(ValueError, match="entropy=nan is not finite"):
        FIRST.update(math.nan)
