"""Importance weights equal hand-worked values and NumPy arithmetic, and give the exact policy gradient."""

import itertools
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.algorithms.peer_cases import COUNT, peer_case
from tests.algorithms.record_importance import MODES, RECORD, bounds, summed
from vantage.algorithms.aggregation import aggregate
from vantage.algorithms.importance import effective_share, importance_weights
from vantage.algorithms.policy_loss import policy_gradient

BY_VERL = Path(__file__).with_name("importance_by_verl.json")


def test_a_cap_by_hand() -> None:
    """Ratios of 1.5, 3 and 0.5 are capped at 2; a fourth token is outside the mask."""
    old = torch.tensor([[0.1, 0.2, 0.3, 0.9]])
    now = torch.tensor([[0.15, 0.6, 0.15, math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    found = importance_weights(now.log(), old.log(), mask, correction="truncate", high=2.0)
    torch.testing.assert_close(found.weights, torch.tensor([[1.5, 2.0, 0.5, 0.0]]))
    assert found.kept.tolist() == mask.tolist()
    assert found.importance_weight.mean() == pytest.approx(4.0 / 3)
    assert found.importance_capped.mean() == pytest.approx(1 / 3)
    assert found.effective_share == pytest.approx(5.0**2 / (3 * (1.5**2 + 3**2 + 0.5**2)))


def test_a_mask_by_hand() -> None:
    """Of the same ratios those within [0.5, 2] are kept: 0.5 is at the bound and stays, and 3 gets the weight 0."""
    old = torch.tensor([[0.1, 0.2, 0.25, 0.9]])
    now = torch.tensor([[0.15, 0.6, 0.125, math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    found = importance_weights(now.log(), old.log(), mask, correction="mask", low=0.5, high=2.0)
    torch.testing.assert_close(found.weights, torch.tensor([[1.5, 0.0, 0.5, 0.0]]))
    assert found.kept.tolist() == [[True, False, True, False]]
    assert found.importance_weight.mean() == pytest.approx(1.0)
    assert found.importance_capped.mean() == pytest.approx(1 / 3)


def test_a_response_has_one_ratio() -> None:
    """The first response has ratios 2 and 3, with product 6 and geometric mean √6. The second has one ratio, 1/2."""
    log_ratio = torch.tensor([[2.0, 3.0], [0.5, math.nan]]).log()
    mask = torch.tensor([[True, True], [True, False]])
    zeros = torch.zeros(2, 2)
    product, mean = (
        importance_weights(log_ratio, zeros, mask, correction="truncate", ratio_of=name, low=0.1, high=10)
        for name in ("sequence", "sequence_mean")
    )
    torch.testing.assert_close(product.weights, torch.tensor([[6.0, 6.0], [0.5, 0.0]]))
    torch.testing.assert_close(mean.weights, torch.tensor([[6**0.5, 6**0.5], [0.5, 0.0]]))
    assert product.effective_share == pytest.approx(6.5**2 / (2 * 36.25))
    dropped = importance_weights(log_ratio, zeros, mask, correction="mask", ratio_of="sequence", high=5)
    assert dropped.weights.tolist() == [[0.0, 0.0], [0.5, 0.0]]
    assert dropped.kept.tolist() == [[False, False], [True, False]]


def test_a_thousand_random_cases() -> None:
    """Weights equal those of loops over tokens in float64, which take no logarithm of a bound."""
    rng = np.random.default_rng(5)
    for _ in range(1000):
        rows, width = rng.integers(1, 5), rng.integers(1, 7)
        lengths = rng.integers(1, width + 1, rows)
        now, old = rng.normal(-2, 0.7, (2, rows, width))
        low, high = rng.choice([0.0, 0.3, 0.8]), rng.choice([1.2, 2.0, math.inf])
        correction, ratio_of = (
            rng.choice(["truncate", "mask"]),
            rng.choice(["token", "sequence", "sequence_mean"]),
        )
        mask = np.arange(width) < lengths[:, None]
        expected, kept, raw = np.zeros((rows, width)), np.zeros((rows, width), dtype=bool), []
        for row, length in enumerate(lengths):
            ratios = [math.exp(now[row, t]) / math.exp(old[row, t]) for t in range(length)]
            if ratio_of != "token":
                whole = math.prod(ratios) ** (1 if ratio_of == "sequence" else 1 / length)
                ratios = [whole] * length
            raw += ratios if ratio_of == "token" else ratios[:1]
            for t, ratio in enumerate(ratios):
                kept[row, t] = correction == "truncate" or low <= ratio <= high
                expected[row, t] = min(max(ratio, low), high) if kept[row, t] else 0.0
        found = importance_weights(
            torch.tensor(now),
            torch.tensor(old),
            torch.tensor(mask),
            correction=correction,
            ratio_of=ratio_of,
            low=low or None,
            high=None if math.isinf(high) else high,
        )
        np.testing.assert_allclose(found.weights.numpy(), expected, rtol=1e-9, atol=1e-12)
        assert (found.kept.numpy() == kept).all()
        share = sum(raw) ** 2 / (len(raw) * sum(each**2 for each in raw))
        assert found.effective_share == pytest.approx(share, rel=1e-9)


def test_no_gradient_flows_and_no_ratio_overflows() -> None:
    now = torch.tensor([[0.0, -1.0]], requires_grad=True)
    old, mask = torch.tensor([[-500.0, -1.0]]), torch.ones(1, 2).bool()
    capped = importance_weights(now, old, mask, correction="truncate", high=5.0)
    assert capped.weights.tolist() == [[5.0, 1.0]] and not capped.weights.requires_grad
    masked = importance_weights(now, old, mask, correction="mask", high=5.0)
    assert masked.weights.tolist() == [[0.0, 1.0]]
    assert masked.effective_share == pytest.approx(0.5), "one of two has all the weight"


def test_an_effective_share_is_between_1_over_n_and_1() -> None:
    assert effective_share(torch.full((7,), -300.0)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([0.0, -900.0, -900.0, -900.0])) == pytest.approx(0.25)
    assert math.isnan(effective_share(torch.zeros(0)))


@pytest.mark.parametrize("ratio_of", ["token", "sequence"])
def test_what_another_policy_drew_teaches_what_the_policys_own_responses_teach(ratio_of: str) -> None:
    """Every response of two tokens out of three is weighted by its probability, so there is no sampling noise.

    A product of ratios without a binding bound has exactly the gradient of the policy's own responses. Ratios of tokens come
    nearer to it than no ratio does.
    """
    torch.manual_seed(3)
    logits = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    sampler = logits.detach() + 0.3 * torch.randn(2, 3, dtype=torch.float64)
    responses = torch.tensor(list(itertools.product(range(3), repeat=2)))
    advantages = torch.randn(len(responses), 1, dtype=torch.float64).expand(-1, 2)
    mask = torch.ones_like(responses).bool()

    def of(table: torch.Tensor) -> torch.Tensor:
        said = table.log_softmax(dim=1)
        return torch.stack([said[place, responses[:, place]] for place in range(2)], dim=1)

    def gradient(drawn_by: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        probability = of(drawn_by).sum(dim=1, keepdim=True).exp().detach()
        loss = policy_gradient(
            of(logits), of(drawn_by).detach(), probability * weights * advantages, mask,
            aggregation="sequence_sum", denominator=1.0,
        )  # fmt: skip
        return torch.autograd.grad(loss.loss, logits)[0]

    exact = gradient(logits.detach(), torch.ones_like(advantages))
    plain = gradient(sampler, torch.ones_like(advantages))
    found = importance_weights(
        of(logits), of(sampler), mask, correction="truncate", ratio_of=ratio_of, low=1e-6, high=1e6
    )
    corrected = gradient(sampler, found.weights)
    error, before = (corrected - exact).norm(), (plain - exact).norm()
    assert before > 0.05
    assert error < (1e-12 if ratio_of == "sequence" else before)


def test_a_masked_token_is_in_no_denominator() -> None:
    """The mean over kept tokens of (1, 2, 9), of which 9 is masked, is 1.5."""
    log_ratio = torch.tensor([[0.0, 0.0, 2.0]])
    found = importance_weights(
        log_ratio, torch.zeros(1, 3), torch.ones(1, 3).bool(), correction="mask", high=2.0
    )
    loss = aggregate(torch.tensor([[1.0, 2.0, 9.0]]), found.kept, aggregation="token", denominator=None)
    assert loss.item() == pytest.approx(1.5)


def test_bounds_are_in_order_and_shapes_are_equal() -> None:
    tokens, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match="high=0.0 is not above 0"):
        importance_weights(tokens, tokens, mask, correction="truncate", high=0.0)
    with pytest.raises(ValueError, match="low=3 is above high=2"):
        importance_weights(tokens, tokens, mask, correction="truncate", low=3, high=2)
    with pytest.raises(ValueError, match="ratio_of='word' is not one of token"):
        importance_weights(tokens, tokens, mask, correction="mask", ratio_of="word", high=2)
    with pytest.raises(ValueError, match=r"sampler_logprobs has shape \(1, 3\)"):
        importance_weights(tokens, torch.zeros(1, 3), mask, correction="truncate", high=2.0)


@pytest.mark.parametrize("case", json.loads(BY_VERL.read_text())["cases"])
def test_recorded_numbers_of_another_library(case: dict[str, Any]) -> None:
    """The file holds verl's weights and rejections of the same ratios, and names verl's functions."""
    width = max(map(len, case["log_ratios"]))
    log_ratio, mask = torch.zeros(2, len(case["log_ratios"]), width, dtype=torch.float64)
    for row, ratios in enumerate(case["log_ratios"]):
        log_ratio[row, : len(ratios)], mask[row, : len(ratios)] = torch.tensor(ratios), 1
    is_token, zeros = mask.bool(), torch.zeros_like(log_ratio)
    for name in ("token", "sequence"):
        found = importance_weights(
            log_ratio, zeros, is_token, correction="truncate", ratio_of=name, high=case["high"]
        )
        assert found.weights[is_token].tolist() == pytest.approx(
            list(chain(*case[f"truncate_{name}"])), abs=1e-6
        )
    for name in ("token", "sequence", "sequence_mean"):
        bounds = {"low": case["low"], "high": case["high"]}
        found = importance_weights(log_ratio, zeros, is_token, correction="mask", ratio_of=name, **bounds)
        assert found.kept[is_token].int().tolist() == list(chain(*case[f"kept_{name}"]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_thousand_minibatches_have_the_weights_of_another_library(mode: str) -> None:
    """The weights equal TRL's, as ``record_importance.py`` has recorded them."""
    ratio_of, _, correction = mode.partition("_")
    ours = []
    for case in map(peer_case, range(COUNT)):
        low, high = bounds(case)
        found = importance_weights(
            case.logprobs,
            case.old_logprobs,
            case.mask,
            correction=correction,
            ratio_of=ratio_of,
            low=low,
            high=high,
        )
        ours.append(summed(found.weights, case))
        assert found.kept.sum() == ours[-1][1], "only what a mask leaves out has the weight 0"
    theirs = torch.tensor(json.loads(RECORD.read_text())[mode], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs, rtol=1e-6, atol=1e-8)
