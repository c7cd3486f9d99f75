import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.preference_loss import bradley_terry, score_centring


def test_by_hand():
    """The Bradley-Terry loss equals the one worked out in the comment."""
    # σ(ln 3) = 3/4 and σ(−ln 3) = 1/4: −ln(3/4) and −ln(1/4). A tie, σ(0) = 1/2, is no correct ranking.
    chosen = torch.tensor([math.log(3), 0.0, 2.0], dtype=torch.float64)
    rejected = torch.tensor([0.0, math.log(3), 2.0], dtype=torch.float64)
    result = bradley_terry(chosen, rejected)
    assert result.loss.item() == pytest.approx((math.log(4 / 3) + math.log(4) + math.log(2)) / 3)
    assert result.pair_accuracy.mean() == pytest.approx(1 / 3)
    assert result.score_gap.sum.item() == pytest.approx(0)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    margin_kind=st.sampled_from(["none", "float", "tensor"]),
    weighted=st.booleans(),
)
def test_value_and_gradient_are_the_definition(seed, margin_kind, weighted):
    rng = np.random.default_rng(seed)
    num_pairs = rng.integers(1, 7)
    weights = rng.integers(0, 3, size=num_pairs) / 2 if weighted else np.ones(num_pairs)
    weights[0] = 1
    chosen, rejected, margins = (
        np.where(weights > 0, rng.normal(size=num_pairs), math.nan) for _ in range(3)
    )
    margin = {"none": None, "float": 0.7, "tensor": torch.tensor(margins)}[margin_kind]
    loss, slopes = 0.0, np.zeros(num_pairs)
    for i in np.flatnonzero(weights):
        margin_i = {"none": 0.0, "float": 0.7, "tensor": margins[i]}[margin_kind]
        probability = 1 / (1 + math.exp(-(chosen[i] - rejected[i] - margin_i)))
        loss += -weights[i] * math.log(probability) / weights.sum()
        slopes[i] = -weights[i] * (1 - probability) / weights.sum()

    leaves = [torch.tensor(scores, requires_grad=True) for scores in (chosen, rejected)]
    result = bradley_terry(*leaves, margin=margin, weights=torch.tensor(weights) if weighted else None)
    assert result.loss.item() == pytest.approx(loss, rel=1e-10)
    gradients = torch.autograd.grad(result.loss, leaves)
    np.testing.assert_allclose(gradients[0].numpy(), slopes, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(gradients[1].numpy(), -slopes, rtol=1e-9, atol=1e-15)
    assert result.pair_accuracy.count.item() == np.count_nonzero(weights)
    assert result.pair_accuracy.sum.item() == np.sum(chosen > rejected)


def test_ranked_responses_weighted_by_their_number_give_the_mean_over_prompts():
    # Prompt A has three responses and so three pairs, prompt B one pair.
    gaps = [0.1, 0.5, -0.3, 2.0]
    weights = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0], dtype=torch.float64)
    nll = [math.log1p(math.exp(-gap)) for gap in gaps]
    result = bradley_terry(
        torch.tensor(gaps, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), weights=weights
    )
    assert result.loss.item() == pytest.approx((sum(nll[:3]) / 3 + nll[3]) / 2)


def test_gradient_by_finite_differences():
    generator = torch.Generator().manual_seed(2)
    chosen, rejected = (
        torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)

    def loss(*scores):
        return bradley_terry(*scores, margin=0.4, weights=weights).loss

    assert torch.autograd.gradcheck(loss, (chosen, rejected))


def test_hopeless_pairs_stay_finite_in_float32():
    chosen = torch.tensor([-200.0], requires_grad=True)
    result = bradley_terry(chosen, torch.tensor([200.0]))
    assert result.loss.item() == 400
    assert torch.autograd.grad(result.loss, chosen)[0].item() == -1


def test_an_empty_micro_batch_gives_0_and_an_empty_minibatch_is_refused():
    chosen = torch.full((2,), math.nan, requires_grad=True)
    rejected, weights = torch.zeros(2), torch.zeros(2)
    result = bradley_terry(chosen, rejected, weights=weights, denominator=4)
    assert result.loss.item() == 0
    assert torch.autograd.grad(result.loss, chosen)[0].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="no pair of positive weight"):
        bradley_terry(chosen, rejected, weights=weights)
    with pytest.raises(ValueError, match="no pair of positive weight"):
        bradley_terry(torch.zeros(0), torch.zeros(0))


def test_margin_and_weights_get_no_gradient():
    margin, weights = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    chosen = torch.zeros(1, requires_grad=True)
    bradley_terry(chosen, torch.zeros(1), margin=margin, weights=weights).loss.backward()
    assert chosen.grad is not None and margin.grad is None and weights.grad is None


def test_refusals():
    """Wrong arguments of the Bradley-Terry loss are refused by message."""
    scores = torch.zeros(2)
    with pytest.raises(ValueError, match="weights has a negative or undefined entry"):
        bradley_terry(scores, scores, weights=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match=r"chosen_scores has shape \(2, 1\); it must be \(N,\)"):
        bradley_terry(scores[:, None], scores)
    with pytest.raises(ValueError, match=r"rejected_scores has shape \(2, 1\); it must be \(2,\)"):
        bradley_terry(scores, scores[:, None])
    with pytest.raises(ValueError, match=r"margin has shape \(1,\); it must be \(2,\)"):
        bradley_terry(scores, scores, margin=torch.zeros(1))
    with pytest.raises(ValueError, match=r"denominator=0.0 is not positive"):
        bradley_terry(scores, scores, denominator=0)


def test_centring_by_hand() -> None:
    """The squared sums (1 + 2)² = 9 and (−1 + 0)² = 1 have the mean 5, and the pair means are 1.5 and −0.5. The
    gradient of each score is twice the sum of its pair, over two pairs."""
    chosen = torch.tensor([1.0, -1.0], requires_grad=True)
    rejected = torch.tensor([2.0, 0.0], requires_grad=True)
    result = score_centring(chosen, rejected)
    assert result.loss.item() == 5.0
    assert result.pair_mean.mean() == 0.5
    result.loss.backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist() == rejected.grad.tolist() == [3.0, -1.0]


def test_centring_over_micro_batches_adds_up() -> None:
    chosen, rejected = torch.tensor([1.0, -1.0, 4.0]), torch.tensor([2.0, 0.0, -3.0])
    parts = [score_centring(chosen[rows], rejected[rows], denominator=3.0).loss for rows in ([0], [1, 2])]
    torch.testing.assert_close(sum(parts), score_centring(chosen, rejected).loss)
    assert score_centring(chosen[:0], rejected[:0], denominator=3.0).loss.item() == 0.0
    with pytest.raises(ValueError, match="there is no pair"):
        score_centring(chosen[:0], rejected[:0])
