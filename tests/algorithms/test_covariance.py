"""Tokens are selected by their covariance, or drawn between its bounds, as worked out by hand, and the loss acts on these alone."""

import math

import pytest
import torch

from vantage.algorithms.covariance import (
    selected_kl_loss,
    selected_tokens,
    token_covariances,
    tokens_to_clip,
    tokens_to_hold,
)

# Four tokens in two rows, NaN behind the second. Means: log π −2, A 1. Products: (1)(1), (−1)(2), (1)(−2), (−1)(−1)
LOGPROBS = torch.tensor([[-1.0, -3.0, -1.0], [-3.0, math.nan, math.nan]])
ADVANTAGES = torch.tensor([[2.0, 3.0, -1.0], [0.0, math.nan, math.nan]])
MASK = torch.tensor([[True, True, True], [True, False, False]])
COVARIANCES = torch.tensor([[1.0, -2.0, -2.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
NOTHING = torch.zeros_like(MASK)


def drawn(seed: int, **named: float) -> list[tuple[int, ...]]:
    """Return the places of the tokens that clip-cov draws."""
    settings = {"low": -9.0, "high": 9.0, "share": 0.5, **named}
    found = tokens_to_clip(
        COVARIANCES, MASK, NOTHING, generator=torch.Generator().manual_seed(seed), **settings
    )
    return [tuple(place) for place in found.nonzero().tolist()]


def test_covariances_by_hand() -> None:
    """Covariances equal those worked out in the comment."""
    found = token_covariances(LOGPROBS.requires_grad_(), ADVANTAGES, MASK)
    assert found.dtype == torch.float64 and not found.requires_grad
    assert found.tolist() == COVARIANCES.tolist()
    none = token_covariances(LOGPROBS, ADVANTAGES, NOTHING)
    assert none.tolist() == [[0.0] * 3] * 2


def test_the_largest_are_held_and_the_first_of_equal_ones() -> None:
    assert tokens_to_hold(COVARIANCES, MASK, share=0.49).nonzero().tolist() == [[0, 0]]
    assert tokens_to_hold(COVARIANCES, MASK, share=0.5).nonzero().tolist() == [[0, 0], [1, 0]]
    assert tokens_to_hold(COVARIANCES, MASK, share=0.75).nonzero().tolist() == [[0, 0], [0, 1], [1, 0]]
    assert tokens_to_hold(COVARIANCES, MASK, share=0.01).sum() == 1, "one at least"
    assert tokens_to_hold(COVARIANCES, NOTHING, share=0.5).sum() == 0


def test_a_draw_is_a_function_of_its_generator() -> None:
    assert drawn(3) == drawn(3)
    draws = {tuple(drawn(seed)) for seed in range(60)}
    places = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert draws == {(one, other) for one in places for other in places if one < other}


def test_tokens_are_drawn_between_the_bounds_and_where_no_clip_binds() -> None:
    assert drawn(1, low=0.0, share=1.0) == [(0, 0), (1, 0)]
    assert drawn(1, high=0.0, share=1.0) == [(0, 1), (0, 2)]
    assert drawn(1, low=1.0, share=1.0) == [], "a bound lies outside"
    assert len(drawn(1, low=0.0, share=0.01)) == 1, "one at least"
    clipped = tokens_to_clip(
        COVARIANCES, MASK, COVARIANCES > 0, low=-9, high=9, share=1.0, generator=torch.Generator()
    )
    assert clipped.nonzero().tolist() == [[0, 1], [0, 2]]


def test_only_selected_tokens_are_held_and_all_count_in_the_denominator() -> None:
    leaf = torch.tensor([[0.5, -0.25, 2.0]], requires_grad=True)
    old, mask = torch.tensor([[0.0, 0.5, math.nan]]), torch.tensor([[True, True, False]])
    found = selected_kl_loss(leaf, old, mask, torch.tensor([[False, True, True]]), aggregation="token")
    assert found.loss.item() == pytest.approx(0.75 / 2)
    assert found.covariance_kl.mean() == pytest.approx(0.75)
    assert torch.autograd.grad(found.loss, leaf)[0].tolist() == [[0.0, -0.5, 0.0]]
    share = selected_tokens(torch.tensor([[False, True, True]]), mask).covariance_fraction
    assert share.mean() == pytest.approx(1 / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_between_two_passes_of_equal_weights_is_no_gradient(dtype: torch.dtype) -> None:
    """Log-probabilities near 3 nats differ by one to four last places, either way; the last token is really apart."""
    places = torch.tensor([[-4.0, -1.0, 0.0, 1.0, 4.0, 4000.0]], dtype=dtype)
    apart = places * 2 * torch.finfo(dtype).eps
    leaf, old = (apart - 3.0).requires_grad_(), torch.full_like(apart, -3.0)
    mask = torch.ones_like(apart, dtype=torch.bool)
    found = selected_kl_loss(leaf, old, mask, mask, aggregation="token", denominator=1.0)
    assert torch.autograd.grad(found.loss, leaf)[0].tolist() == [[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]
    assert found.loss.item() == pytest.approx(4010 * 2 * torch.finfo(dtype).eps, rel=1e-3), "its value stays"


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match=f"share={share} is not above 0 and at most 1"):
        tokens_to_hold(COVARIANCES, MASK, share=share)
    with pytest.raises(ValueError, match=f"share={share} is not above 0 and at most 1"):
        drawn(0, share=share)


def test_shapes_are_equal() -> None:
    """Tensors of unequal shapes are refused."""
    with pytest.raises(ValueError, match=r"advantages has shape \(1, 3\)"):
        token_covariances(LOGPROBS, torch.zeros(1, 3), MASK)
    wide, mask = torch.zeros(1, 3), torch.ones(1, 2, dtype=torch.bool)
    rates = {"low": -1.0, "high": 1.0, "share": 0.5, "generator": torch.Generator()}
    for covariances, is_clipped, name in [
        (wide, mask, "covariances"),
        (torch.zeros(1, 2), torch.ones_like(wide, dtype=torch.bool), "is_clipped"),
    ]:
        with pytest.raises(ValueError, match=rf"{name} has shape \(1, 3\)"):
            tokens_to_clip(covariances, mask, is_clipped, **rates)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"selected has shape \(1, 3\)"):
        selected_kl_loss(
            torch.zeros(1, 2), torch.zeros(1, 2), mask, wide.bool(), aggregation="token", denominator=1.0
        )
