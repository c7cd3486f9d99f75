"""Schedules equal values that are worked out by hand, and steps refuse what is not finite."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vantage.tasks.training.nonfinite import TrainingDiverged
from vantage.tasks.training.optimization import (
    learning_rate_at,
    make_optimizer,
    take_step,
)


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    rates = [
        learning_rate_at(s, peak=1.0, warmup_steps=4, total_steps=10, schedule="constant") for s in range(6)
    ]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_from_the_peak_towards_zero() -> None:
    def at(step: int, schedule: str) -> float:
        return learning_rate_at(step, peak=2.0, warmup_steps=0, total_steps=10, schedule=schedule)  # type: ignore[arg-type]

    assert at(0, "linear") == 2.0
    assert at(5, "linear") == pytest.approx(1.0)
    assert at(10, "linear") == 0.0
    assert at(5, "cosine") == pytest.approx(1.0)
    # cos(π/4) = √½: half way between the peak and the middle in angle
    assert at(2.5, "cosine") == pytest.approx(1.0 + math.sqrt(0.5))  # type: ignore[arg-type]


def test_the_first_step_of_adamw_moves_each_weight_by_the_learning_rate() -> None:
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = make_optimizer(layer, weight_decay=0.0)
    layer(torch.tensor([[3.0, -4.0]])).sum().backward()
    norm = take_step(optimizer, layer, learning_rate=0.01, max_grad_norm=100.0)
    assert norm == pytest.approx(5.0)
    # Adam's first step is lr · g/|g|, whatever the size of g
    torch.testing.assert_close(layer.weight.detach() - before, torch.tensor([[-0.01, 0.01]]))
    assert layer.weight.grad is None


def test_only_matrices_are_decayed() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(module, weight_decay=0.1)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(module[0].weight)}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_touches_nothing(bad: float) -> None:
    layer = nn.Linear(2, 1)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    optimizer = make_optimizer(layer, weight_decay=0.1)
    (layer(torch.tensor([[1.0, bad]])).sum()).backward()
    with pytest.raises(TrainingDiverged, match="lower the learning rate"):
        take_step(optimizer, layer, learning_rate=0.1, max_grad_norm=1.0)
    for name, tensor in layer.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert not optimizer.state


class Launched(TorchDispatchMode):
    """Counts the operators that are called inside its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def launched_by_a_step(num_layers: int) -> Counter[str]:
    """Return the operators that the second step calls, because the first step also creates the moments."""
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_layers)))
    optimizer = make_optimizer(module, weight_decay=0.1)
    for _ in range(2):
        module(torch.ones(2, 3)).sum().backward()
        with Launched() as launched:
            take_step(optimizer, module, learning_rate=0.01, max_grad_norm=1e-3)
    return launched.names


def test_a_step_launches_as_many_operators_however_many_parameters_there_are() -> None:
    """A step calls one operator for the norms and one to clip. Matrices and vectors have one each to count steps, and
    one that is AdamW."""
    few, many = launched_by_a_step(2), launched_by_a_step(40)
    assert many == few
    assert few["_fused_adamw_"] == few["_foreach_add_"] == 2
    assert few["_foreach_norm"] == few["_foreach_mul_"] == 1
    assert few.total() <= 20
