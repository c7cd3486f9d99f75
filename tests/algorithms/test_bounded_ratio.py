"""Losses that bound the ratio in other ways than PPO equal hand-worked values and loops over tokens in float64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vantage.algorithms.bounded_ratio import clipped_weight_gradient, geometric_mean_surrogate, soft_gate
from vantage.algorithms.policy_loss import PolicyLoss, clipped_surrogate, log_ratio_of_level

RANGES = {"clip_range_low": 0.2, "clip_range_high": 0.5}
Numbers = list[list[float]]


def tensors(ratios: Numbers, advantages: Numbers) -> tuple[torch.Tensor, ...]:
    """Return ragged rows as logprobs (a leaf, of which −3 is the old one), old, advantages and mask, with NaN outside
    the mask.
    """
    width = max(map(len, ratios))
    shape = (len(ratios), width)
    log_ratio, advantage = (torch.full(shape, math.nan, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, numbers in enumerate(ratios):
        log_ratio[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64).log()
        advantage[row, : len(numbers)] = torch.tensor(advantages[row], dtype=torch.float64)
        mask[row, : len(numbers)] = True
    old = torch.where(mask, -3.0, math.nan).double()
    return (old + log_ratio).requires_grad_(), old, advantage, mask


def slopes(loss: PolicyLoss, leaf: torch.Tensor) -> list[list[float]]:
    found: list[list[float]] = torch.autograd.grad(loss.loss, leaf)[0].tolist()
    return found


def test_a_ratio_of_the_response_by_hand() -> None:
    """√(2·8) = 4 is clipped to 1.5 where A = 1, and with it both tokens; 1/4 of the second is left alone where A = 2."""
    leaf, *given = tensors([[2.0, 8.0], [0.25]], [[1.0, 1.0], [2.0]])
    found = clipped_surrogate(leaf, *given, **RANGES, ratio_level="sequence", aggregation="sequence")
    assert found.loss.item() == pytest.approx(-(1.5 + 2 * 0.25) / 2)
    assert slopes(found, leaf) == [[0.0, 0.0], pytest.approx([-2 * 0.25 / 2, 0.0])]
    assert found.clip_fraction.mean() == pytest.approx(2 / 3)
    assert found.ratio.mean() == pytest.approx(10.25 / 3), "of tokens, as in every loss"
    assert found.ratio_deviation.mean() == pytest.approx((1 + 7 + 0.75) / 3)


def test_tokens_of_a_response_may_have_advantages_of_their_own() -> None:
    """As in GSPO-token, s = 4 for both tokens, and each token's slope is −s·A/length."""
    leaf, *given = tensors([[2.0, 8.0]], [[3.0, -1.0]])
    found = clipped_surrogate(
        leaf,
        *given,
        clip_range_low=None,
        clip_range_high=None,
        ratio_level="sequence",
        aggregation="sequence",
    )
    assert found.loss.item() == pytest.approx(-(4 * 3 - 4) / 2)
    assert slopes(found, leaf) == [pytest.approx([-6.0, 2.0])]


def test_a_clipped_weight_by_hand() -> None:
    """ρ = 2, 0.5 and 1.25 are clipped to the weights 1.5, 0.8 and 1.25. A token's loss is −weight·A·log π, where
    log π = −3 + log ρ."""
    leaf, *given = tensors([[2.0, 0.5, 1.25]], [[1.0, 1.0, -2.0]])
    found = clipped_weight_gradient(leaf, *given, **RANGES, aggregation="token")
    logprobs = [-3 + math.log(2), -3 + math.log(0.5), -3 + math.log(1.25)]
    assert found.loss.item() == pytest.approx(
        -(1.5 * logprobs[0] + 0.8 * logprobs[1] - 2.5 * logprobs[2]) / 3
    )
    assert slopes(found, leaf) == [pytest.approx([-1.5 / 3, -0.8 / 3, 2.5 / 3])]
    assert (found.weight_clip_fraction.mean(), found.clip_fraction.mean()) == (pytest.approx(2 / 3), 0.0)
    open_below = clipped_weight_gradient(
        leaf, *given, clip_range_low=None, clip_range_high=0.5, aggregation="token"
    )
    assert slopes(open_below, leaf) == [pytest.approx([-1.5 / 3, -0.5 / 3, 2.5 / 3])]


def test_a_clipped_weight_of_the_response() -> None:
    leaf, *given = tensors([[2.0, 0.5]], [[1.0, 1.0]])
    found = clipped_weight_gradient(leaf, *given, **RANGES, ratio_level="sequence", aggregation="token")
    assert slopes(found, leaf) == [pytest.approx([-0.5, -0.5])], "√(2·1/2) = 1"
    assert found.weight_clip_fraction.sum == 0


def test_a_soft_gate_by_hand() -> None:
    """At ρ = 1 the value is 2/τ·A and the slope is A, where τ = 2 for A > 0 and τ = 4 for A < 0."""
    leaf, *given = tensors([[1.0, 1.5, 1.5]], [[1.0, 1.0, -1.0]])
    found = soft_gate(leaf, *given, temperature_positive=2.0, temperature_negative=4.0, aggregation="token")
    opened = [0.5, 1 / (1 + math.exp(-2 * 0.5)), 1 / (1 + math.exp(-4 * 0.5))]
    gates = [2 * opened[0], 2 * opened[1], 1 * opened[2]]
    assert found.loss.item() == pytest.approx(-(gates[0] + gates[1] - gates[2]) / 3)
    slope = [4 * each * (1 - each) for each in opened]
    assert slope[0] == 1.0
    assert slopes(found, leaf) == [pytest.approx([-slope[0] / 3, -slope[1] * 1.5 / 3, slope[2] * 1.5 / 3])]
    assert found.gate_slope.mean() == pytest.approx(sum(slope) / 3)
    assert (found.clip_fraction.sum, found.dual_clip_fraction.sum) == (0, 0)


def test_a_soft_gate_takes_an_overflowing_ratio_out_of_the_gradient() -> None:
    leaf = torch.tensor([[0.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -1.0]])
    found = soft_gate(
        leaf, old, torch.tensor([[1.0, 1.0]]), old < 0,
        temperature_positive=1.0, temperature_negative=1.05, aggregation="token",
    )  # fmt: skip
    assert found.loss.item() == pytest.approx(-(4 + 2) / 2)
    assert slopes(found, leaf) == [[0.0, -0.5]]


def test_a_geometric_mean_by_hand() -> None:
    """Where A = 1, ratios of 2 and 0.25 count as 1.5 and 0.25, and their mean is √0.375: only the upper bound clips.
    Where A = −2, ratios of 4 and 0.5 count as 4 and 0.8, and their mean is √3.2: only the lower bound clips."""
    leaf, *given = tensors([[2.0, 0.25], [4.0, 0.5]], [[1.0, 1.0], [-2.0, -2.0]])
    found = geometric_mean_surrogate(leaf, *given, **RANGES, aggregation="sequence")
    first, second = math.sqrt(1.5 * 0.25), math.sqrt(4 * 0.8)
    assert found.loss.item() == pytest.approx(-(first - 2 * second) / 2)
    assert slopes(found, leaf) == [
        pytest.approx([0.0, -first / 2 / 2]),
        pytest.approx([2 * second / 2 / 2, 0.0]),
    ]
    assert found.clip_fraction.mean() == pytest.approx(2 / 4)


def test_a_geometric_mean_by_length() -> None:
    """With `aggregation: token`, a response of two tokens weighs twice as much as one of one token."""
    leaf, *given = tensors([[1.2, 1.2], [0.9]], [[1.0, 1.0], [3.0]])
    found = geometric_mean_surrogate(leaf, *given, **RANGES, aggregation="token")
    assert found.loss.item() == pytest.approx(-(2 * 1.2 + 3 * 0.9) / 3)


# -- random cases


def oracle(name: str, ratios: Numbers, advantages: Numbers) -> tuple[float, Numbers]:
    """Return the mean over responses of the mean over tokens, and its slope at each token's log-probability; for cispo,
    log π is 0.
    """
    loss, found = 0.0, []
    for rho, given in zip(ratios, advantages, strict=True):
        length, row = len(rho), []
        for t, advantage in enumerate(given):
            share = 1 / (len(ratios) * length)
            if name == "gspo":
                mean = math.prod(rho) ** (1 / length)
                is_clipped = (advantage > 0 and mean > 1.5) or (advantage < 0 and mean < 0.8)
                bound = min(max(mean, 0.8), 1.5) if is_clipped else mean
                loss -= bound * advantage * share
                row.append(0.0 if is_clipped else -mean * advantage * share)
            elif name == "cispo":
                row.append(-min(max(rho[t], 0.8), 1.5) * advantage * share)
                loss += row[-1] * (math.log(rho[t]) - 3)
            elif name == "sapo":
                tau = 0.7 if advantage > 0 else 1.9
                opened = 1 / (1 + math.exp(-tau * (rho[t] - 1)))
                loss -= 4 / tau * opened * advantage * share
                row.append(-4 * opened * (1 - opened) * rho[t] * advantage * share)
            else:
                bounds = [min(r, 1.5) if given[0] > 0 else max(r, 0.8) for r in rho]
                mean = math.prod(bounds) ** (1 / length)
                loss -= mean * advantage * share
                row.append(-mean * advantage * share if bounds[t] == rho[t] else 0.0)
        found.append(row)
    return loss, found


LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "gspo": lambda *given: clipped_surrogate(
        *given, **RANGES, ratio_level="sequence", aggregation="sequence"
    ),
    "cispo": lambda *given: clipped_weight_gradient(*given, **RANGES, aggregation="sequence"),
    "sapo": lambda *given: soft_gate(
        *given, temperature_positive=0.7, temperature_negative=1.9, aggregation="sequence"
    ),
    "gmpo": lambda *given: geometric_mean_surrogate(*given, **RANGES, aggregation="sequence"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_thousand_random_cases(name: str) -> None:
    rng = np.random.default_rng(8)
    for _ in range(1000):
        lengths = rng.integers(1, 6, size=rng.integers(1, 4))
        ratios = [np.exp(rng.normal(0, 0.6, size=length)).tolist() for length in lengths]
        advantages = [
            [rng.normal()] * length if name == "gmpo" else rng.normal(size=length).tolist()
            for length in lengths
        ]
        leaf, *given = tensors(ratios, advantages)
        found = LOSSES[name](leaf, *given)
        loss, expected = oracle(name, ratios, advantages)
        assert found.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
        for row, slope in zip(expected, slopes(found, leaf), strict=True):
            assert slope[: len(row)] == pytest.approx(row, rel=1e-9, abs=1e-12)
            assert slope[len(row) :] == [0.0] * (len(slope) - len(row))


@pytest.mark.parametrize("name", LOSSES)
def test_where_nothing_has_moved_the_gradient_is_the_policy_gradient(name: str) -> None:
    advantages = [[2.0, 2.0, 2.0], [-1.0]]
    leaf, *given = tensors([[1.0, 1.0, 1.0], [1.0]], advantages)
    found = LOSSES[name](leaf, *given)
    assert slopes(found, leaf) == [pytest.approx([-1 / 3] * 3), pytest.approx([0.5, 0.0, 0.0])]


# -- refusals


@pytest.mark.parametrize(
    "loss, settings, said",
    [
        (soft_gate, {"temperature_positive": 0.0, "temperature_negative": 1.0}, "temperature_positive=0.0 is not positive"),
        (soft_gate, {"temperature_positive": 1.0, "temperature_negative": -1.0}, "temperature_negative=-1.0 is not positive"),
        (clipped_weight_gradient, {"clip_range_low": 0.2, "clip_range_high": 0.0}, "clip_range_high=0.0 is not positive"),
        (geometric_mean_surrogate, {"clip_range_low": 2.0, "clip_range_high": 0.1}, "clip_range_low=2.0 is above 1"),
    ],
)  # fmt: skip
def test_what_is_refused(loss: Any, settings: dict[str, float], said: str) -> None:
    """Wrong shapes and settings of the losses are refused by message."""
    leaf, *given = tensors([[1.0]], [[1.0]])
    with pytest.raises(ValueError, match=said):
        loss(leaf, *given, **settings, aggregation="token")
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(1, 2\)"):
        loss(leaf, torch.zeros(1, 2), *given[1:], **settings, aggregation="token")


def test_a_level_has_a_known_name() -> None:
    with pytest.raises(ValueError, match="ratio_level='word' is not one of token, sequence"):
        log_ratio_of_level(torch.zeros(1, 1), torch.ones(1, 1).bool(), level="word")  # type: ignore[arg-type]
