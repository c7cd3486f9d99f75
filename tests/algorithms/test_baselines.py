"""Baselines of prompts equal hand-worked values, plain loops in float64, and the limits that the papers name."""

import math

import pytest
import torch

from vantage.algorithms.baselines import TrackedMeans, optimal_values, sample_means, tracked

SCORES = torch.tensor([[1.0, 0.0, 0.0, 1.0], [-2.0, 3.0, 0.5, 0.0]])


def test_the_mean_of_the_samples() -> None:
    assert sample_means(SCORES).tolist() == [0.5, 0.375]


def test_the_optimal_value_by_hand() -> None:
    """With β = 1/2, as in A*-PO, the optimal value is ½·log of the mean of e^(2r)."""
    first = 0.5 * math.log((2 * math.exp(2) + 2) / 4)
    second = 0.5 * math.log((math.exp(-4) + math.exp(6) + math.exp(1) + 1) / 4)
    assert optimal_values(SCORES, beta=0.5).tolist() == pytest.approx([first, second], rel=1e-12)


def test_the_optimal_value_lies_between_the_mean_and_the_best() -> None:
    values = torch.stack([optimal_values(SCORES, beta=beta) for beta in (1e-3, 0.1, 1.0, 10.0, 1e6)])
    assert (values.diff(dim=0) < 0).all(), "the larger β, the less the best counts"
    assert values[0].tolist() == pytest.approx([1.0, 3.0], abs=2e-3)
    assert values[-1].tolist() == pytest.approx([0.5, 0.375], abs=1e-5)


def test_one_sample_is_its_own_value_at_any_beta() -> None:
    single = torch.tensor([[0.3], [-7.0]])
    for beta in (1e-3, 0.5, 100.0):
        assert optimal_values(single, beta=beta).tolist() == pytest.approx([0.3, -7.0], abs=1e-6)


def test_large_scores_do_not_overflow() -> None:
    assert optimal_values(torch.tensor([[1e4, 0.0]]), beta=1e-2).tolist() == pytest.approx([1e4], rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_a_beta_that_is_not_positive_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="not positive"):
        optimal_values(SCORES, beta=beta)


def start(*means: float, weight: float = 8.0) -> TrackedMeans:
    return TrackedMeans(
        torch.tensor(means, dtype=torch.float64), torch.full((len(means),), weight, dtype=torch.float64)
    )


SWITCHES = {"half_life": 0.06, "low": 0.875, "high": 0.96}


def test_one_step_of_the_tracker_by_hand() -> None:
    """The policy moved by a quarter of the half-life on prompt 0: ρ = 2^(−1/4) = 0.841 is clamped to 0.875. It did not
    move on prompt 1: ρ = 1 is clamped to 0.96. Prompt 2 is not sampled."""
    after = tracked(
        start(0.5, 0.25, 0.1),
        torch.tensor([1, 0]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.015, 0.0, 0.5]),
        **SWITCHES,
    )
    assert after.weights.tolist() == pytest.approx([0.875 * 8 + 1, 0.96 * 8 + 1, 8.0])
    assert after.means.tolist() == pytest.approx(
        [(0.875 * 8 * 0.5 + 1) / 8, 0.96 * 8 * 0.25 / (0.96 * 8 + 1), 0.1]
    )


def test_memory_halves_at_the_half_life_where_it_may() -> None:
    after = tracked(
        start(1.0),
        torch.tensor([0]),
        torch.tensor([0.0]),
        torch.tensor([0.06]),
        half_life=0.06,
        low=0.1,
        high=0.96,
    )
    assert after.weights.item() == pytest.approx(0.5 * 8 + 1)
    assert after.means.item() == pytest.approx(4 / 5)


def test_right_and_wrong_answers_are_the_mean_of_a_beta_distribution() -> None:
    """α ← ρα + r and β ← ρβ + (1 − r), as the paper writes it for scores of 0 and 1."""
    torch.manual_seed(0)
    alpha, beta, state = 3.0, 5.0, start(3 / 8)
    for _ in range(200):
        reward, kl = float(torch.rand(()) < 0.7), float(torch.rand(())) * 0.02
        memory = min(max(2 ** (-kl / 0.06), 0.875), 0.96)
        alpha, beta = memory * alpha + reward, memory * beta + 1 - reward
        state = tracked(
            state,
            torch.tensor([0]),
            torch.tensor([reward]),
            torch.tensor([kl], dtype=torch.float64),
            **SWITCHES,
        )
        assert state.means.item() == pytest.approx(alpha / (alpha + beta), rel=1e-12)
    assert state.weights.item() <= 1 / (1 - 0.96)


def test_several_scores_of_a_prompt_count_each_and_forget_once() -> None:
    after = tracked(
        start(0.2, 0.9), torch.tensor([0, 0, 0]), torch.tensor([1.0, 0.0, 1.0]), torch.zeros(2), **SWITCHES
    )
    assert after.weights.tolist() == pytest.approx([0.96 * 8 + 3, 8.0])
    assert after.means.tolist() == pytest.approx([(0.96 * 8 * 0.2 + 2) / (0.96 * 8 + 3), 0.9])


def test_the_order_of_the_rollout_does_not_matter() -> None:
    prompts, scores = torch.tensor([2, 0, 2, 1]), torch.tensor([0.5, 1.0, -1.0, 0.0])
    order = torch.tensor([3, 0, 2, 1])
    kl = torch.tensor([0.0, 0.01, 0.02])
    one = tracked(start(0.1, 0.2, 0.3), prompts, scores, kl, **SWITCHES)
    other = tracked(start(0.1, 0.2, 0.3), prompts[order], scores[order], kl, **SWITCHES)
    assert torch.allclose(one.means, other.means, atol=1e-15)
    assert torch.equal(one.weights, other.weights)


@pytest.mark.parametrize(
    "arguments",
    [
        (start(0.0), torch.tensor([0]), torch.tensor([0.0, 1.0]), torch.zeros(1)),
        (start(0.0), torch.tensor([0]), torch.tensor([0.0]), torch.zeros(2)),
    ],
)
def test_unequal_shapes_are_refused(
    arguments: tuple[TrackedMeans, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    with pytest.raises(ValueError, match="shape"):
        tracked(*arguments, **SWITCHES)


def test_scores_must_be_samples_of_prompts() -> None:
    with pytest.raises(ValueError, match=r"\(P,K\)"):
        sample_means(torch.zeros(4))
