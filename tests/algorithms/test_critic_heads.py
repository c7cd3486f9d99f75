"""Critics with several outputs: losses equal written-out sums, minima equal closed forms, calibration equals a hand-worked one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.every import every
from vantage.algorithms.critic_heads import (
    agreement_weights,
    calibration_bounds,
    disagreement_of_heads,
    own_values,
    quantile_calibration_error,
    quantile_huber_loss,
    quantile_levels,
    shares_up_to,
)

NAN = float("nan")


def by_hand(quantiles: Tensor, targets: Tensor, mask: Tensor, kappa: float) -> float:
    """Return the quantile loss, computed for every token and every quantile on its own."""
    losses = []
    for b, t in mask.nonzero().tolist():
        of_token = []
        count = quantiles.shape[-1]
        for i in range(count):
            u = targets[b, t].item() - quantiles[b, t, i].item()
            tau = (i + 0.5) / count
            size = abs(u)
            if kappa:
                size = u * u / (2 * kappa) if abs(u) <= kappa else abs(u) - kappa / 2
            of_token.append((tau if u >= 0 else 1 - tau) * size)
        losses.append(sum(of_token) / count)
    return sum(losses) / len(losses)


def test_the_levels_are_midpoints() -> None:
    assert quantile_levels(4).tolist() == [0.125, 0.375, 0.625, 0.875]


@settings(max_examples=1000)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 4),
    width=st.integers(1, 5),
    count=st.integers(2, 7),
    kappa=st.sampled_from([0.0, 0.05, 0.5, 1.0, 3.0]),
)
def test_the_loss_is_its_sum_written_out(seed: int, rows: int, width: int, count: int, kappa: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    quantiles = torch.randn(rows, width, count, generator=draw, dtype=torch.float64)
    targets = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=draw) < 0.7
    mask[0, 0] = True
    expected = by_hand(quantiles, targets, mask, kappa)
    hidden = quantiles.masked_fill(~mask[..., None], NAN)
    loss = quantile_huber_loss(hidden, targets.masked_fill(~mask, NAN), mask, huber=kappa)
    # targets, levels and losses are in float32 or better; the levels are float32
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def minimum_of(returns: list[float], count: int, kappa: float) -> Tensor:
    """Return the quantiles at which gradient descent ends, for one state with these equally likely returns."""
    targets = torch.tensor(returns, dtype=torch.float64)[:, None]
    mask = torch.ones_like(targets, dtype=torch.bool)
    quantiles = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [quantiles], max_iter=2000, line_search_fn="strong_wolfe", tolerance_grad=1e-12
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = quantile_huber_loss(quantiles.expand(len(returns), 1, count), targets, mask, huber=kappa)
        loss.backward()
        return loss

    optimizer.step(closure)
    return quantiles.detach()


@every("kappa, mean", [(1.0, 0.184), (0.1, 0.111)])
def test_the_mean_of_smoothed_quantiles_is_off_as_the_docs_say(kappa: float, mean: float) -> None:
    """Of ten returns nine are 0 and one is 1. The quantile q of each level τ solves
    p·τ·min((1 − q)/κ, 1) = (1 − p)(1 − τ)·min(q/κ, 1) with p = 0.1."""
    p, count = 0.1, 200
    found = minimum_of([0.0] * 9 + [1.0], count, kappa)
    expected = []
    for i in range(count):
        tau = (i + 0.5) / count
        low, high = 0.0, 1.0
        for _ in range(80):
            q = (low + high) / 2
            up = p * tau * min((1 - q) / kappa, 1)
            down = (1 - p) * (1 - tau) * min(q / kappa, 1)
            low, high = (q, high) if up > down else (low, q)
        expected.append(low)
    assert found.tolist() == pytest.approx(expected, abs=2e-3)
    assert sum(expected) / count == pytest.approx(mean, abs=1e-3)


def test_without_smoothing_the_minima_are_quantiles_of_the_returns() -> None:
    """For returns 1 … 8 and four levels, any number between the neighbours of the level is a minimum."""
    quantiles = torch.tensor([1.5, 3.4, 5.5, 7.5], dtype=torch.float64)
    targets = torch.arange(1, 9, dtype=torch.float64)[:, None]
    mask = torch.ones_like(targets, dtype=torch.bool)

    def loss(shift: float, number: int) -> float:
        moved = quantiles.clone()
        moved[number] += shift
        return quantile_huber_loss(moved.expand(8, 1, 4), targets, mask, huber=0.0).item()

    for number, (low, high) in enumerate([(1, 2), (3, 4), (5, 6), (7, 8)]):
        level = 8 * (number + 0.5) / 4
        assert level == low, "between the value of the level and the next one the loss is flat"
        at = quantiles[number].item()
        flat = loss(0.0, number)
        assert loss(low + 0.1 - at, number) == pytest.approx(flat)
        assert loss(high - 0.1 - at, number) == pytest.approx(flat)
        assert loss(low - 0.5 - at, number) > flat + 1e-6 < loss(high + 0.5 - at, number)


def test_parts_of_a_minibatch_add_up() -> None:
    draw = torch.Generator().manual_seed(3)
    quantiles, targets = torch.randn(6, 4, 5, generator=draw), torch.randn(6, 4, generator=draw)
    mask = torch.arange(4)[None] < torch.tensor([1, 4, 2, 3, 4, 1])[:, None]
    whole = quantile_huber_loss(quantiles, targets, mask, huber=0.2)
    parts = [
        quantile_huber_loss(
            quantiles[rows], targets[rows], mask[rows], huber=0.2, denominator=int(mask.sum())
        )
        for rows in (slice(0, 1), slice(1, 6))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)  # type: ignore[union-attr]


def test_the_gradient_flows_through_the_quantiles_alone() -> None:
    quantiles, targets = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    quantile_huber_loss(quantiles, targets, mask, huber=0.1).backward()
    assert targets.grad is None
    assert quantiles.grad is not None
    assert bool((quantiles.grad[~mask] == 0).all()) and bool((quantiles.grad[mask] != 0).all())


def test_a_negative_kappa_is_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"huber=-1 is negative; use 0"):
        quantile_huber_loss(one[..., None], one, one == 0, huber=-1)


def test_each_response_has_its_own_head() -> None:
    values = torch.arange(12.0).reshape(2, 2, 3)
    assert own_values(values, torch.tensor([2, 0])).tolist() == [[2.0, 5.0], [6.0, 9.0]]


def test_disagreement_is_the_standard_deviation_of_the_population() -> None:
    found = disagreement_of_heads(torch.tensor([[[1.0, 3.0], [2.0, 2.0]]]))
    assert found.tolist() == [[1.0, 0.0]]


def test_tokens_on_which_the_heads_agree_lose_their_advantage() -> None:
    """Of five valid tokens, the ⌊0.4 · 5⌋ = 2 with spreads of 0.1 and 0.2 lose their advantage. Masked ones do not
    count."""
    spread = torch.tensor([[0.1, 0.5, NAN], [0.3, 0.2, 0.4]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert agreement_weights(spread, mask, share=0.4).tolist() == [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]
    assert agreement_weights(spread, mask, share=0.0).tolist() == [[1.0] * 3] * 2
    # ⌊0.99 · 5⌋ = 4 leaves the largest one
    assert agreement_weights(spread, mask, share=0.99)[mask].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_equal_heads_silence_no_token() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert bool((agreement_weights(torch.zeros(2, 3), mask, share=0.5) == 1).all())
    tied = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    assert agreement_weights(tied, mask[:1, :1].expand(1, 4), share=0.5).tolist() == [[0.0, 1.0, 1.0, 1.0]]


@every(
    "mask, share, message",
    [
        (torch.ones(1, 2, dtype=torch.bool), 1.0, r"share=1.0 is not in \[0, 1\)"),
        (torch.zeros(1, 2, dtype=torch.bool), 0.5, "has no True element"),
        (torch.ones(1, 3, dtype=torch.bool), 0.5, r"disagreement has shape \(1, 2\)"),
    ],
)
def test_weights_are_refused(mask: Tensor, share: float, message: str) -> None:
    """A wrong share or mask for the weights of agreement is refused."""
    with pytest.raises(ValueError, match=message):
        agreement_weights(torch.zeros(1, 2), mask, share=share)


# -- calibration of the distribution


def test_bounds_lie_between_different_returns() -> None:
    mask = torch.ones(1, 10, dtype=torch.bool)
    successes = torch.tensor([[0.0] * 7 + [1.0] * 3])
    assert calibration_bounds(successes, mask).tolist() == [0.5]
    assert calibration_bounds(torch.arange(10.0)[None], mask).tolist() == [
        1.5,
        2.5,
        3.5,
        4.5,
        5.5,
        6.5,
        7.5,
        8.5,
    ]
    assert calibration_bounds(torch.ones(1, 10), mask).tolist() == []
    # tenths of the tokens, of which most are 0: 0 seven times, then 1 and 3
    often_nothing = torch.tensor([[0.0] * 16 + [1.0, 2.0, 3.0, 4.0]])
    mask = torch.ones(1, 20, dtype=torch.bool)
    assert calibration_bounds(often_nothing, mask).tolist() == [0.5, 1.5, 3.5]
    # nine tenths and more are the larger return: the bound is between the two all the same
    assert calibration_bounds(
        torch.tensor([[0.0] + [1.0] * 99]), torch.ones(1, 100, dtype=torch.bool)
    ).tolist() == [0.5]


def test_shares_count_quantiles_up_to_a_bound() -> None:
    quantiles = torch.tensor([[[0.0, 0.5, 1.0, 2.0]]])
    assert shares_up_to(quantiles, torch.tensor([0.5, -1.0, 3.0])).tolist() == [[[0.5, 0.0, 1.0]]]


def error(quantiles: Tensor, returns: Tensor, mask: Tensor) -> float:
    bounds = calibration_bounds(returns, mask)
    return quantile_calibration_error(shares_up_to(quantiles, bounds), returns, mask, bounds)


def test_a_critic_that_knows_how_often_is_calibrated_and_a_sure_one_is_not() -> None:
    """Three of ten returns are 1 and the others 0. Quantiles of 0 and 1 in these shares have no error, and quantiles
    that are all 0.3 have an error of 0.3."""
    mask = torch.ones(1, 10, dtype=torch.bool)
    returns = torch.tensor([[0.0] * 7 + [1.0] * 3])
    knowing = torch.tensor([0.0] * 7 + [1.0] * 3).expand(1, 10, 10)
    assert error(knowing, returns, mask) == pytest.approx(0.0, abs=1e-7)
    assert error(torch.full((1, 10, 10), 0.3), returns, mask) == pytest.approx(0.3)
    padded = torch.nn.functional.pad(returns, (0, 1), value=NAN)
    wider = torch.nn.functional.pad(knowing, (0, 0, 0, 1), value=NAN)
    assert error(wider, padded, torch.nn.functional.pad(mask, (0, 1))) == pytest.approx(0.0, abs=1e-7)


def test_returns_that_do_not_vary_have_no_distribution() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert math.isnan(
        quantile_calibration_error(torch.zeros(1, 3, 0), torch.ones(1, 3), mask, torch.zeros(0))
    )
    with pytest.raises(ValueError, match="has no True element"):
        calibration_bounds(torch.ones(1, 3), ~mask)
