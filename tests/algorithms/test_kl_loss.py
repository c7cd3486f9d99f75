import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.kl import full_kl
from vantage.algorithms.kl_loss import exact_kl_loss, old_kl_loss, reference_kl_loss

seeds = st.integers(0, 2**32 - 1)
LOG2 = math.log(2)


def test_reference_kl_by_hand():
    # Two tokens: ρ = 2 and ½, Δ = ln 2 and −ln 2, then a pad that holds garbage.
    #   k2:  2·½ln²2 + ½·½ln²2 = 1.25·ln²2         ∂/∂logp: ρ·Δ = 2·ln 2, −½·ln 2
    #   k3:  2·(½ − 1 + ln 2) + ½·(2 − 1 − ln 2)   ∂/∂logp: ρ·(1 − e^(−Δ)) = 2·½, ½·(−1)
    #   abs: 2·ln 2 + ½·ln 2                       ∂/∂logp: ρ·sign Δ = 2, −½
    # Each divided by the two tokens. ρ itself has no gradient.
    expected = {
        "k2": (1.25 * LOG2**2, [2 * LOG2, -0.5 * LOG2]),
        "k3": (2 * (LOG2 - 0.5) + 0.5 * (1 - LOG2), [1.0, -0.5]),
        "abs": (2.5 * LOG2, [2.0, -0.5]),
    }
    mask = torch.tensor([[True, True, False]])
    for kind, (total, slopes) in expected.items():
        leaf = torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64, requires_grad=True)
        ref = torch.tensor([[-1 - LOG2, -2 + LOG2, math.inf]], dtype=torch.float64, requires_grad=True)
        old = torch.tensor([[-1 - LOG2, -2 + LOG2, -math.inf]], dtype=torch.float64, requires_grad=True)
        result = reference_kl_loss(leaf, ref, old, mask, kind=kind, aggregation="token")
        assert result.loss.item() == pytest.approx(total / 2, rel=1e-12)
        assert result.kl_loss.sum.item() == pytest.approx(total, rel=1e-12) and result.kl_loss.count == 2
        result.loss.backward()
        np.testing.assert_allclose(leaf.grad.numpy(), [[slopes[0] / 2, slopes[1] / 2, 0]], rtol=1e-12)
        assert ref.grad is None and old.grad is None


@settings(max_examples=50)
@given(
    seed=seeds,
    kind=st.sampled_from(["abs", "k2", "k3"]),
    aggregation=st.sampled_from(["token", "sequence", "sequence_sum"]),
)
def test_reference_kl_is_its_definition(seed, kind, aggregation):
    rng = np.random.default_rng(seed)
    mask = rng.random((rng.integers(1, 5), rng.integers(1, 7))) < 0.7
    mask[0, 0] = True
    new, ref, old = (np.where(mask, rng.normal(size=mask.shape), math.nan) for _ in range(3))
    num_rows, loss, gradient = mask.any(axis=1).sum(), 0.0, np.zeros(mask.shape)
    for row, t in zip(*np.nonzero(mask), strict=True):
        weight = {"token": 1 / mask.sum(), "sequence": 1 / mask[row].sum() / num_rows}.get(aggregation)
        weight = 1 / num_rows if weight is None else weight
        delta, ratio = new[row, t] - ref[row, t], math.exp(new[row, t] - old[row, t])
        value, slope = {
            "abs": (abs(delta), math.copysign(1, delta)),
            "k2": (delta**2 / 2, delta),
            "k3": (math.exp(-delta) - 1 + delta, 1 - math.exp(-delta)),
        }[kind]
        loss += weight * ratio * value
        gradient[row, t] = weight * ratio * slope
    leaf = torch.tensor(new, requires_grad=True)
    result = reference_kl_loss(
        leaf,
        torch.tensor(ref),
        torch.tensor(old),
        torch.tensor(mask),
        kind=kind,
        aggregation=aggregation,
    )
    assert result.loss.item() == pytest.approx(loss, rel=1e-10)
    np.testing.assert_allclose(torch.autograd.grad(result.loss, leaf)[0].numpy(), gradient, rtol=1e-10)


@pytest.fixture
def tokens_of_old():
    """Return four tokens 0, 0, 1, 2, one to a row: over a vocabulary of three they are the expectation under old = (½,
    ¼, ¼).
    """
    old = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    logits = torch.tensor([0.3, -0.8, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([-0.5, 0.4, 0.2], dtype=torch.float64), 0)
    return logits, ref, old, torch.tensor([[0], [0], [1], [2]])


def gradient(scalar, logits):
    return torch.autograd.grad(scalar, logits)[0].numpy()


def test_the_detached_ratio_makes_old_samples_give_the_gradients_of_the_present_policy(tokens_of_old):
    logits, ref, old, tokens = tokens_of_old
    mask = torch.ones(4, 1, dtype=torch.bool)

    def loss(kind):
        logprobs = torch.log_softmax(logits, 0)
        return reference_kl_loss(
            logprobs[tokens], ref[tokens], old[tokens], mask, kind=kind, aggregation="token"
        )

    exact = full_kl(logits, ref)
    np.testing.assert_allclose(gradient(loss("k2").loss, logits), gradient(exact, logits), rtol=1e-10)
    reverse = (torch.softmax(logits, 0) - ref.exp()).detach().numpy()  # ∇KL(ref‖π)
    np.testing.assert_allclose(gradient(loss("k3").loss, logits), reverse, rtol=1e-10)
    assert loss("k3").loss.item() == pytest.approx(exact.item(), rel=1e-12)  # the unbiased one


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_through_the_ratio_the_gradient_is_that_of_the_kl_itself(tokens_of_old, kind):
    """The expected gradient over samples of the old policy is ∇Σ_v π(v)·k(v), with both factors differentiated. The
    value of the loss does not change."""
    logits, ref, old, tokens = tokens_of_old
    logprobs = torch.log_softmax(logits, 0)
    given = (logprobs[tokens], ref[tokens], old[tokens], torch.ones(4, 1, dtype=torch.bool))
    found = reference_kl_loss(*given, kind=kind, through_ratio=True, aggregation="token")
    exact = full_kl(logits, ref)
    assert found.loss.item() == pytest.approx(exact.item(), rel=1e-12)
    np.testing.assert_allclose(gradient(found.loss, logits), gradient(exact, logits), rtol=1e-10)


@pytest.mark.parametrize("kind", ["abs", "k2"])
def test_a_biased_estimator_has_no_unbiased_gradient(tokens_of_old, kind):
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match=f"kind='{kind}' has another expectation than KL.*use k1 or k3"):
        reference_kl_loss(ones, ones, ones, ones.bool(), kind=kind, through_ratio=True, aggregation="token")


def test_exact_kl_needs_no_ratio(tokens_of_old):
    # The same state four times, whatever token old sampled there: value and gradient are those of full_kl.
    logits, ref, _, _ = tokens_of_old
    kl = full_kl(logits.expand(4, 1, 3), ref.expand(4, 1, 3))
    result = exact_kl_loss(kl, torch.ones(4, 1, dtype=torch.bool), aggregation="token")
    exact = full_kl(logits, ref)
    assert result.loss.item() == pytest.approx(exact.item(), rel=1e-12)
    np.testing.assert_allclose(gradient(result.loss, logits), gradient(exact, logits), rtol=1e-12)


def test_exact_kl_by_hand():
    # Row means 2 and 6 by sequence: 4; the metric is over the three tokens: 10/3.
    kl = torch.tensor([[1.0, 3.0], [6.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    result = exact_kl_loss(kl, mask, aggregation="sequence")
    assert result.loss.item() == 4
    assert (result.kl_loss.sum.item(), result.kl_loss.count.item()) == (10, 3)
    assert torch.autograd.grad(result.loss, kl)[0].tolist() == [[0.25, 0.25], [0.5, 0.0]]


def test_old_kl_by_hand():
    # ℓ = ln 2 and −ln 2 as above. k1: 0 in all. k3: (1 − ln 2) + (ln 2 − ½) = ½; ∂/∂logp: e^ℓ − 1 = 1, −½.
    mask = torch.tensor([[True, True, False]])
    for kind, total, slopes in (("k1", 0.0, [-1.0, -1.0]), ("k3", 0.5, [1.0, -0.5])):
        leaf = torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64, requires_grad=True)
        old = torch.tensor([[-1 - LOG2, -2 + LOG2, -math.inf]], dtype=torch.float64, requires_grad=True)
        result = old_kl_loss(leaf, old, mask, kind=kind, aggregation="token")
        assert result.loss.item() == pytest.approx(total / 2, abs=1e-12)
        assert result.old_kl.sum.item() == pytest.approx(total, abs=1e-12) and result.old_kl.count == 2
        result.loss.backward()
        np.testing.assert_allclose(leaf.grad.numpy(), [[slopes[0] / 2, slopes[1] / 2, 0]], rtol=1e-12)
        assert old.grad is None


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_old_kl_on_old_samples_is_kl_old_new_with_its_gradient(tokens_of_old, kind):
    logits, _, old, tokens = tokens_of_old
    logprobs = torch.log_softmax(logits, 0)
    result = old_kl_loss(
        logprobs[tokens], old[tokens], torch.ones(4, 1, dtype=torch.bool), kind=kind, aggregation="token"
    )
    probability = torch.softmax(logits, 0).detach().numpy()
    exact = sum(math.exp(o) * (o - math.log(p)) for o, p in zip(old.tolist(), probability, strict=True))
    assert result.loss.item() == pytest.approx(exact, rel=1e-12)
    # ∂KL(old‖new)/∂logit_v = new(v) − old(v)
    np.testing.assert_allclose(gradient(result.loss, logits), probability - old.exp().numpy(), rtol=1e-10)


def test_at_the_sampling_policy_the_penalty_is_0_and_k3_pulls_nowhere():
    leaf = torch.tensor([[-1.0, -0.2]], requires_grad=True)
    result = old_kl_loss(leaf, leaf.detach(), torch.ones(1, 2).bool(), kind="k3", aggregation="token")
    assert result.loss == 0 and torch.autograd.grad(result.loss, leaf)[0].tolist() == [[0.0, 0.0]]


def test_an_empty_micro_batch_gives_0_and_a_zero_gradient():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    leaf, other = torch.full((1, 2), math.nan, requires_grad=True), torch.full((1, 2), math.inf)
    for result in (
        reference_kl_loss(leaf, other, other, nothing, kind="k2", aggregation="token", denominator=3),
        exact_kl_loss(leaf, nothing, aggregation="sequence", denominator=3),
        old_kl_loss(leaf, other, nothing, kind="k3", aggregation="constant", denominator=3),
    ):
        assert result.loss == 0
        assert torch.autograd.grad(result.loss, leaf)[0].tolist() == [[0.0, 0.0]]


def test_a_nan_at_a_response_token_is_not_hidden():
    mask, fine, broken = torch.ones(1, 2).bool(), torch.zeros(1, 2), torch.tensor([[0.0, math.nan]])
    for place in range(3):
        tensors = [fine, fine, fine]
        tensors[place] = broken
        assert reference_kl_loss(*tensors, mask, kind="k3", aggregation="token").loss.isnan()
    assert old_kl_loss(fine, broken, mask, kind="k3", aggregation="token").loss.isnan()
    assert exact_kl_loss(broken, mask, aggregation="token").loss.isnan()


def test_refusals():
    """Wrong arguments of the KL losses are refused by message."""
    ones, mask = torch.ones(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(
        ValueError, match=r"kind='k1' has an expected gradient of 0, .* put k1 into the reward"
    ):
        reference_kl_loss(ones, ones, ones, mask, kind="k1", aggregation="token")
    with pytest.raises(
        ValueError,
        match="kind='full' is no loss on sampled tokens; use one of abs, k2, k3, or exact_kl_loss",
    ):
        reference_kl_loss(ones, ones, ones, mask, kind="full", aggregation="token")
    with pytest.raises(ValueError, match="kind='abs' is not an estimate from sampled tokens"):
        old_kl_loss(ones, ones, mask, kind="abs", aggregation="token")
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \(1, 3\); it must be \(1, 2\)"):
        reference_kl_loss(ones, torch.ones(1, 3), ones, mask, kind="k2", aggregation="token")
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(1, 3\); it must be \(1, 2\)"):
        old_kl_loss(ones, torch.ones(1, 3), mask, kind="k3", aggregation="token")
    with pytest.raises(ValueError, match=r"kl has shape \(1, 3\); it must be \(1, 2\)"):
        exact_kl_loss(torch.ones(1, 3), mask, aggregation="token")
    with pytest.raises(ValueError, match="response_mask has no True element"):
        exact_kl_loss(ones, ~mask, aggregation="token")
