"""The guard around an optimiser step acts by the surrogate and KL of a linear model, which the test sets."""

import copy
from collections.abc import Callable, Iterator
from math import nan
from typing import Any

import pytest
import torch
from torch import nn

from vantage.tasks.training.optimization import take_step
from vantage.tasks.updates.trust_region import Guarded, guarded_step

LEARNING_RATE = 0.5
MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1),
}


class Trained:
    """A linear model that has taken one step, with the gradient of the next one in place."""

    def __init__(self, optimizer: str, *, steps_before: int = 1) -> None:
        self.network = nn.Linear(3, 2)
        with torch.no_grad():
            self.network.weight.copy_(torch.tensor([[0.5, -1.0, 0.25], [2.0, 0.125, -0.5]]))
            self.network.bias.copy_(torch.tensor([0.1, -0.2]))
        self.optimizer = OPTIMIZERS[optimizer](self.network.parameters())
        for _ in range(steps_before):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.backward()
        self.shares: list[float] = []

    def backward(self) -> None:
        """Leave a gradient, the same at every step."""
        self.network(torch.tensor([[1.0, -2.0, 0.5]])).sum().backward()

    def step(self, share: float) -> dict[str, float]:
        """Take a step as the stage does it: the gradient is clipped in place and then cleared."""
        self.shares.append(share)
        norm = take_step(self.optimizer, self.network, learning_rate=share * LEARNING_RATE, max_grad_norm=0.5)
        return {"grad_norm": norm, "learning_rate": share * LEARNING_RATE}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy."""
        return copy.deepcopy(self.network.state_dict())

    def moments(self) -> dict[str, Any]:
        """Return a copy."""
        return copy.deepcopy(self.optimizer.state_dict())

    def guarded(
        self, measured: list[tuple[float, float]], *, before: float = -1.0, halvings: int = 3
    ) -> Guarded:
        """Return a guarded step whose tries have these measured surrogates and KLs. The KL may be at most 0.01."""
        tries = iter(measured)
        result = guarded_step(
            self.step,
            lambda: next(tries),
            self.network,
            self.optimizer,
            surrogate_before=before,
            max_kl=0.01,
            halvings=halvings,
        )
        assert next(tries, None) is None, "a try was not measured"
        return result


def same(found: Any, expected: Any) -> bool:
    """Return whether both are bitwise the same, all the way down."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


optimizers = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
GOOD, TOO_FAR, WORSE = (-1.5, 0.005), (-1.5, 0.02), (-0.9, 0.005)


@optimizers
def test_a_step_inside_the_region_is_the_step_without_a_guard(optimizer: str) -> None:
    guarded, plain = Trained(optimizer), Trained(optimizer)
    result = guarded.guarded([GOOD])
    metrics = plain.step(1.0)
    assert result == Guarded(metrics, undone=0, accepted=True)
    assert same(guarded.weights(), plain.weights())
    assert same(guarded.moments(), plain.moments())
    assert all(parameter.grad is None for parameter in guarded.network.parameters())


@optimizers
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("bad", [TOO_FAR, WORSE, (nan, 0.005), (-1.5, nan)], ids=str)
def test_a_bad_step_is_undone_and_half_of_it_taken(
    optimizer: str, steps_before: int, bad: tuple[float, float]
) -> None:
    """What stays is exactly what half a step alone would have left: weights, moments, counts of steps."""
    guarded = Trained(optimizer, steps_before=steps_before)
    result = guarded.guarded([bad, GOOD])
    half = Trained(optimizer, steps_before=steps_before)
    metrics = half.step(0.5)
    assert result == Guarded(metrics, undone=1, accepted=True)
    assert guarded.shares == [1.0, 0.5]
    assert same(guarded.weights(), half.weights())
    assert same(guarded.moments(), half.moments())
    whole = Trained(optimizer, steps_before=steps_before)
    whole.step(1.0)
    assert not same(guarded.weights(), whole.weights())


def test_every_try_starts_from_the_gradient_that_was_accumulated() -> None:
    """Each clips it in place: the norm before clipping is the same at the third try."""
    guarded, quarter = Trained("sgd"), Trained("sgd")
    result = guarded.guarded([TOO_FAR, WORSE, GOOD])
    assert result == Guarded(quarter.step(0.25), undone=2, accepted=True)
    assert result.metrics["grad_norm"] > 0.5
    assert same(guarded.weights(), quarter.weights())


@optimizers
@pytest.mark.parametrize("steps_before", [0, 1])
def test_after_the_last_halving_all_is_as_before(optimizer: str, steps_before: int) -> None:
    trained = Trained(optimizer, steps_before=steps_before)
    weights, moments = trained.weights(), trained.moments()
    result = trained.guarded([TOO_FAR, WORSE, TOO_FAR], halvings=2)
    assert (result.accepted, result.undone) == (False, 3)
    assert result.metrics["learning_rate"] == LEARNING_RATE / 4
    assert trained.shares == [1.0, 0.5, 0.25]
    assert same(trained.weights(), weights)
    assert same(trained.moments(), moments)
    assert all(parameter.grad is None for parameter in trained.network.parameters())
    # training goes on as if nothing had been tried
    untouched = Trained(optimizer, steps_before=steps_before)
    trained.backward()
    assert trained.step(1.0) == untouched.step(1.0)
    assert same(trained.weights(), untouched.weights())


def test_without_halvings_there_is_one_try() -> None:
    trained = Trained("adamw")
    assert trained.guarded([TOO_FAR], halvings=0).undone == 1
    assert trained.shares == [1.0]


def test_the_bounds_themselves_are_inside_and_rounding_is_no_worsening() -> None:
    assert Trained("sgd").guarded([(-1.0, 0.01)], before=-1.0).accepted
    assert Trained("sgd").guarded([(-1.0 + 5e-8, 0.0)], before=-1.0).accepted
    assert not Trained("sgd").guarded([(-1.0 + 1e-5, 0.0)], before=-1.0, halvings=0).accepted
    assert Trained("sgd").guarded([(0.0, 0.0)], before=0.0).accepted


def test_a_parameter_without_a_gradient_stays_without_one() -> None:
    trained = Trained("adamw", steps_before=0)
    trained.network.bias.grad = None
    bias = trained.network.bias.detach().clone()
    assert trained.guarded([TOO_FAR, GOOD]).accepted
    assert torch.equal(trained.network.bias, bias)
    assert trained.network.bias not in trained.optimizer.state


def test_a_real_step_is_halved_until_it_is_near_enough() -> None:
    """The policy is Bernoulli with p = σ(w), and its exact KL and surrogate after each try decide."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(network.weight)  # p = 0.5
    optimizer = torch.optim.SGD(network.parameters(), lr=8.0)

    def surrogate() -> torch.Tensor:
        return -2 * torch.sigmoid(network.weight.sum())  # −ρ·A of the better action: ρ = p/0.5, A = 1

    def measure() -> tuple[float, float]:
        with torch.no_grad():
            p = torch.sigmoid(network.weight.sum())
            kl = -0.5 * torch.log(4 * p * (1 - p))  # ½·log(½/p) + ½·log(½/(1 − p))
            return surrogate().item(), kl.item()

    def step(share: float) -> dict[str, float]:
        return {"grad_norm": take_step(optimizer, network, learning_rate=8.0 * share, max_grad_norm=9.0)}

    surrogate().backward()  # d/dw = −2·p·(1 − p) = −0.5: a whole step goes to w = 4
    result = guarded_step(step, measure, network, optimizer, surrogate_before=-1.0, max_kl=0.15, halvings=5)
    # KL is 1.33 at w = 4, 0.43 at 2, 0.12 at 1
    assert (result.accepted, result.undone) == (True, 2)
    assert network.weight.item() == pytest.approx(1.0)
