import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.aggregation import aggregate
from vantage.algorithms.kl import kl_estimate, old_kl_estimate

ROUNDING = 64 * np.finfo(np.float64).eps
KINDS = ["k1", "abs", "k2", "k3"]


def test_by_hand():
    """The estimates k1, abs, k2 and k3 equal those worked out in the comment."""
    # Δ = ln 2 and Δ = −ln 2: e^(−Δ) is ½ and 2.
    logprobs, ref_logprobs = torch.tensor([-1.0, -3.0]), torch.tensor([-1 - math.log(2), -3 + math.log(2)])
    log2 = math.log(2)
    expected = {
        "k1": [log2, -log2],
        "abs": [log2, log2],
        "k2": [0.5 * log2**2, 0.5 * log2**2],
        "k3": [0.5 - 1 + log2, 2 - 1 - log2],
    }
    for kind in KINDS:
        np.testing.assert_allclose(
            kl_estimate(logprobs, ref_logprobs, kind=kind).numpy(), expected[kind], rtol=1e-5
        )


@pytest.fixture
def distributions():
    """Return logits of π over five tokens, and a reference's log-probabilities: an expectation is a sum."""
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(size=5), requires_grad=True)
    return logits, torch.log_softmax(torch.tensor(rng.normal(size=5)), 0)


def exact_kl(p_logits, q_logits):
    """Return Σ_v p(v) (log p(v) − log q(v)), over the whole vocabulary."""
    log_p, log_q = torch.log_softmax(p_logits, 0), torch.log_softmax(q_logits, 0)
    return (log_p.exp() * (log_p - log_q)).sum()


def expectation(logits, per_token):
    """Return Σ_v π(v)·per_token(v), with π held fixed, since it only draws the samples."""
    return (torch.softmax(logits, 0).detach() * per_token).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(distributions, kind):
    logits, ref = distributions
    estimate = kl_estimate(torch.log_softmax(logits, 0), ref, kind=kind)
    assert expectation(logits, estimate).item() == pytest.approx(exact_kl(logits, ref).item(), rel=1e-12)


@pytest.mark.parametrize("kind", ["abs", "k2"])
def test_abs_and_k2_are_biased(distributions, kind):
    logits, ref = distributions
    estimate = kl_estimate(torch.log_softmax(logits, 0), ref, kind=kind)
    assert abs(expectation(logits, estimate).item() - exact_kl(logits, ref).item()) > 0.01


def test_expected_gradients_as_a_loss(distributions):
    logits, ref = distributions

    def gradient(scalar):
        return torch.autograd.grad(scalar, logits)[0].numpy()

    def loss_gradient(kind):
        return gradient(expectation(logits, kl_estimate(torch.log_softmax(logits, 0), ref, kind=kind)))

    np.testing.assert_allclose(loss_gradient("k1"), 0, atol=1e-15)
    np.testing.assert_allclose(loss_gradient("k2"), gradient(exact_kl(logits, ref)), rtol=1e-10)
    np.testing.assert_allclose(loss_gradient("k3"), gradient(exact_kl(ref, logits)), rtol=1e-10)


def test_k1_in_the_reward_gives_the_gradient_of_the_exact_kl(distributions):
    # REINFORCE with a cost of k1: E[k1 · ∇ log π].
    logits, ref = distributions
    logprobs = torch.log_softmax(logits, 0)
    cost = kl_estimate(logprobs, ref, kind="k1").detach()
    measured = torch.autograd.grad(expectation(logits, cost * logprobs), logits, retain_graph=True)[0]
    expected = torch.autograd.grad(exact_kl(logits, ref), logits)[0]
    np.testing.assert_allclose(measured.numpy(), expected.numpy(), rtol=1e-10)


@settings(max_examples=60)
@given(difference=st.floats(-20, 20), kind=st.sampled_from(KINDS))
def test_value_and_gradient_are_the_definition(difference, kind):
    logprobs = torch.tensor([-21.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(logprobs, logprobs.detach() - difference, kind=kind)
    delta = (logprobs.detach() - (logprobs.detach() - difference)).item()
    value, slope = {
        "k1": (delta, 1.0),
        "abs": (abs(delta), float(np.sign(delta)) if abs(delta) > ROUNDING else 0.0),
        "k2": (0.5 * delta**2, delta),
        "k3": (math.expm1(-delta) + delta, -math.expm1(-delta)),
    }[kind]
    assert estimate.item() == pytest.approx(value, rel=1e-12, abs=1e-15)
    assert torch.autograd.grad(estimate.sum(), logprobs)[0].item() == pytest.approx(
        slope, rel=1e-12, abs=1e-15
    )


def test_k3_keeps_its_digits_and_its_sign_near_the_reference():
    # About ½Δ²: 5e-9 at Δ = 1e-4, where e^(−Δ) − 1 + Δ in float32 would round to a multiple of 6e-8.
    delta = torch.tensor([1e-4, -1e-4, 1e-3, -1e-3])
    k3 = kl_estimate(delta, torch.zeros(4), kind="k3")
    np.testing.assert_allclose(k3.numpy(), 0.5 * delta.numpy() ** 2, rtol=2e-3)
    tiny = torch.logspace(-12, 0, 20_000)
    assert (kl_estimate(torch.cat([tiny, -tiny]), torch.zeros(40_000), kind="k3") >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_garbage_under_a_mask_leaves_no_trace_in_value_or_gradient(kind, garbage):
    mask = torch.tensor([[True, True, False, False]])
    clean = torch.tensor([[-1.0, -2.0, -1.0, -1.0]])
    ref = torch.tensor([[-1.5, -1.5, -1.0, garbage]])
    dirty = clean.clone()
    dirty[0, 2] = garbage
    results = []
    for logprobs, ref_logprobs in ((clean, clean * 0 - 1.5), (dirty, ref)):
        leaf = logprobs.clone().requires_grad_()
        loss = aggregate(
            kl_estimate(leaf, ref_logprobs, kind=kind), mask, aggregation="token", denominator=None
        )
        results.append((loss.item(), torch.autograd.grad(loss, leaf)[0].tolist()))
    assert results[0] == results[1]


def test_a_non_finite_estimate_at_a_response_token_is_not_hidden():
    estimate = kl_estimate(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -math.inf]), kind="k3")
    assert math.isnan(estimate[0]) and estimate[1] == math.inf


def test_the_reference_gets_no_gradient_and_half_precision_is_widened():
    ref = torch.tensor([-1.0], requires_grad=True)
    assert not kl_estimate(torch.tensor([-2.0]), ref, kind="k2").requires_grad
    assert kl_estimate(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1), kind="k1").dtype == torch.float32


def test_refusals():
    """Wrong arguments of the KL estimates are refused by message."""
    with pytest.raises(
        ValueError, match="kind='full' is not an estimate from sampled tokens; use one of k1, abs, k2, k3"
    ):
        kl_estimate(torch.zeros(2), torch.zeros(2), kind="full")
    with pytest.raises(
        ValueError, match=r"ref_logprobs has shape \(3,\); it must be that of logprobs, \(2,\)"
    ):
        kl_estimate(torch.zeros(2), torch.zeros(3), kind="k1")


def test_old_kl_by_hand():
    # ℓ = ln 2 and ℓ = −ln 2: k1 is −ℓ; k3 is 2 − 1 − ln 2 and ½ − 1 + ln 2.
    log2 = math.log(2)
    old = torch.tensor([-1.0, -3.0], dtype=torch.float64)
    new = old + torch.tensor([log2, -log2], dtype=torch.float64)
    np.testing.assert_allclose(old_kl_estimate(new, old, kind="k1").numpy(), [-log2, log2], rtol=1e-12)
    np.testing.assert_allclose(
        old_kl_estimate(new, old, kind="k3").numpy(), [1 - log2, log2 - 0.5], rtol=1e-12
    )


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_old_kl_and_its_gradient_are_those_of_kl_old_new_in_expectation_over_old(distributions, kind):
    logits, old = distributions
    estimate = old_kl_estimate(torch.log_softmax(logits, 0), old, kind=kind)
    expected = expectation(old, estimate)  # log-probabilities are logits of the same distribution
    exact = exact_kl(old, logits)
    assert expected.item() == pytest.approx(exact.item(), rel=1e-12)
    measured = torch.autograd.grad(expected, logits)[0].numpy()
    np.testing.assert_allclose(measured, torch.autograd.grad(exact, logits)[0].numpy(), rtol=1e-10)
    # It is neither KL(new‖old) nor what the estimates against a reference give on the same tokens.
    swapped = expectation(old, kl_estimate(torch.log_softmax(logits, 0), old, kind=kind)).item()
    assert abs(exact_kl(logits, old).item() - exact.item()) > 0.01 and abs(swapped - exact.item()) > 0.01


@settings(max_examples=60)
@given(log_ratio=st.floats(-20, 20), kind=st.sampled_from(["k1", "k3"]))
def test_old_kl_value_and_gradient_are_the_definition(log_ratio, kind):
    old = torch.tensor([-21.0], dtype=torch.float64)
    leaf = (old + log_ratio).requires_grad_()
    exact = (leaf.detach() - old).item()
    value, slope = {"k1": (-exact, -1.0), "k3": (math.expm1(exact) - exact, math.expm1(exact))}[kind]
    estimate = old_kl_estimate(leaf, old, kind=kind)
    assert estimate.item() == pytest.approx(value, rel=1e-12, abs=1e-15)
    assert torch.autograd.grad(estimate.sum(), leaf)[0].item() == pytest.approx(slope, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_old_kl_keeps_a_value_that_is_not_finite_and_passes_no_gradient_of_it(kind, garbage):
    leaf = torch.tensor([-1.0, garbage, -1.0], requires_grad=True)
    estimate = old_kl_estimate(leaf, torch.tensor([-1.5, -1.0, math.nan]), kind=kind)
    shown = estimate.detach()
    assert shown[2].isnan() and (shown[1].isnan() or shown[1].abs() > 1e29)
    gradient = torch.autograd.grad(torch.where(torch.tensor([True, False, False]), estimate, 0).sum(), leaf)
    assert gradient[0].isfinite().all() and gradient[0][1:].tolist() == [0.0, 0.0]


def test_old_kl_is_never_negative_as_k3_and_keeps_its_digits():
    tiny = torch.logspace(-12, 0, 5_000)
    assert (old_kl_estimate(torch.cat([tiny, -tiny]), torch.zeros(10_000), kind="k3") >= 0).all()
    near = old_kl_estimate(torch.tensor([1e-4]), torch.zeros(1), kind="k3").item()
    assert near == pytest.approx(0.5e-8, rel=1e-3)


def test_old_kl_refusals_and_types():
    old = torch.tensor([-1.0], requires_grad=True)
    assert not old_kl_estimate(torch.tensor([-2.0]), old, kind="k3").requires_grad
    assert old_kl_estimate(old.bfloat16(), torch.zeros(1), kind="k1").dtype == torch.float32
    with pytest.raises(
        ValueError, match="kind='k2' is not an estimate from sampled tokens; use one of k1, k3"
    ):
        old_kl_estimate(torch.zeros(2), torch.zeros(2), kind="k2")
    with pytest.raises(
        ValueError, match=r"old_logprobs has shape \(3,\); it must be that of logprobs, \(2,\)"
    ):
        old_kl_estimate(torch.zeros(2), torch.zeros(3), kind="k1")
