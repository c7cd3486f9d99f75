"""The weights of the highest measurement are kept, and no others."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vantage.tasks.training.best_weights import keep_if_best
from vantage.tasks.training.stage_state import BestSoFar
from vantage.tasks.value_pretraining import ValueState


def test_only_what_is_above_all_before_is_kept() -> None:
    module = nn.Linear(1, 1, bias=False)
    attempt: Any = SimpleNamespace(state=ValueState(without_gain=7), best={})
    kept = []
    for iteration, measured in enumerate([-3.0, -4.0, -3.0, -1.0, float("nan"), -2.0]):
        with torch.no_grad():
            module.weight.fill_(iteration)
        kept.append(keep_if_best(attempt, module, measured, metric="score", iteration=iteration))
    assert kept == [True, False, False, True, False, False]
    assert attempt.state == ValueState(best=-1.0, best_iteration=3, without_gain=7)
    assert attempt.best["weight"].item() == 3.0


def test_what_is_undefined_is_beaten_by_any_number() -> None:
    """NaN cannot stand in a checkpoint's JSON; the weights of the first measurement are there to go back to."""
    module = nn.Linear(1, 1)
    attempt: Any = SimpleNamespace(state=BestSoFar(), best={})
    assert keep_if_best(attempt, module, float("nan"), metric="score", iteration=0)
    assert attempt.state.best is None
    assert set(attempt.best) == {"weight", "bias"}
    assert keep_if_best(attempt, module, -9.0, metric="score", iteration=2)
    assert attempt.state == BestSoFar(best=-9.0, best_iteration=2)
