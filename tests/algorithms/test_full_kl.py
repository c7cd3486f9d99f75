"""KL over the whole vocabulary, and the expectations of its estimates from sampled tokens, equal exact sums."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vantage.algorithms.kl import full_kl, kl_estimate

seeds = st.integers(0, 2**32 - 1)


def softmax(logits):
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def kl_by_definition(logits, ref_logits):
    p, q = softmax(logits), softmax(ref_logits)
    return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def gradient_of_kl(logits, ref_logits):
    """Return ∂KL(π‖ref)/∂logit_v = π(v)·(log π(v) − log π_ref(v) − KL), by differentiating the softmax on paper."""
    p, q, kl = softmax(logits), softmax(ref_logits), kl_by_definition(logits, ref_logits)
    return [a * (math.log(a) - math.log(b) - kl) if a > 0 else 0.0 for a, b in zip(p, q, strict=True)]


def random_logits(seed, shape):
    rng = np.random.default_rng(seed)
    return rng.normal(scale=2, size=shape), rng.normal(scale=2, size=shape)


def test_by_hand():
    """KL over the whole vocabulary equals the one worked out in the comment."""
    # π = (½, ½), ref = (¼, ¾): ½·ln 2 + ½·ln ⅔. Logits are logs of any multiple of the probabilities.
    logits = torch.tensor([[5.0, 5.0]], dtype=torch.float64)
    ref_logits = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64)
    measured = full_kl(logits, ref_logits)
    assert measured.shape == (1,)
    assert measured.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-12)


@settings(max_examples=40)
@given(seed=seeds)
def test_value_and_gradient_are_the_definition(seed):
    logits, ref_logits = random_logits(seed, (2, 3, 5))
    leaf = torch.tensor(logits, requires_grad=True)
    kl = full_kl(leaf, torch.tensor(ref_logits))
    gradient = torch.autograd.grad(kl.sum(), leaf)[0].numpy()
    assert kl.shape == (2, 3) and (kl > 0).all()
    for state in np.ndindex(2, 3):
        assert kl[state].item() == pytest.approx(kl_by_definition(logits[state], ref_logits[state]))
        np.testing.assert_allclose(
            gradient[state], gradient_of_kl(logits[state], ref_logits[state]), atol=1e-12
        )


def test_gradient_by_finite_differences():
    logits, ref_logits = (torch.tensor(array) for array in random_logits(1, (2, 4)))
    assert torch.autograd.gradcheck(lambda leaf: full_kl(leaf, ref_logits), logits.requires_grad_())


@settings(max_examples=20)
@given(seed=seeds)
def test_k1_and_k3_are_it_in_expectation(seed):
    logits, ref_logits = (torch.tensor(array) for array in random_logits(seed, 6))
    logprobs, ref_logprobs = torch.log_softmax(logits, 0), torch.log_softmax(ref_logits, 0)
    exact = full_kl(logits, ref_logits).item()
    for kind in ("k1", "k3"):
        expected = (logprobs.exp() * kl_estimate(logprobs, ref_logprobs, kind=kind)).sum().item()
        assert expected == pytest.approx(exact, rel=1e-10, abs=1e-12)


@settings(max_examples=20)
@given(seed=seeds)
def test_expected_gradients_as_a_loss(seed):
    # Σ_v π(v)·∇estimate(v), π held fixed: k2 and the full sum have the gradient of KL(π‖ref); k3 has that of
    # KL(ref‖π), which is π(v) − π_ref(v); k1 has none.
    logits, ref_logits = random_logits(seed, 6)
    leaf, ref = torch.tensor(logits, requires_grad=True), torch.tensor(ref_logits)

    def gradient(scalar):
        return torch.autograd.grad(scalar, leaf)[0].numpy()

    def of_loss(kind):
        logprobs = torch.log_softmax(leaf, 0)
        estimate = kl_estimate(logprobs, torch.log_softmax(ref, 0), kind=kind)
        return gradient((logprobs.detach().exp() * estimate).sum())

    towards_ref = gradient_of_kl(logits, ref_logits)
    np.testing.assert_allclose(gradient(full_kl(leaf, ref)), towards_ref, atol=1e-12)
    np.testing.assert_allclose(of_loss("k2"), towards_ref, atol=1e-12)
    reverse = np.subtract(softmax(logits), softmax(ref_logits))
    np.testing.assert_allclose(of_loss("k3"), reverse, atol=1e-12)
    np.testing.assert_allclose(of_loss("k1"), 0, atol=1e-12)
    assert np.abs(reverse - towards_ref).max() > 1e-6  # the two are different gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_that_neither_can_say_is_as_if_it_were_not_there(dtype):
    leaf = torch.tensor([[0.3, -math.inf, 1.0, -math.inf]], dtype=dtype, requires_grad=True)
    ref = torch.tensor([[-0.2, -math.inf, 0.4, -math.inf]], dtype=dtype)
    kl = full_kl(leaf, ref)
    gradient = torch.autograd.grad(kl.sum(), leaf)[0]
    without = leaf.detach()[:, [0, 2]].clone().requires_grad_()
    expected = full_kl(without, ref[:, [0, 2]])
    torch.testing.assert_close(kl, expected)
    torch.testing.assert_close(gradient[:, [0, 2]], torch.autograd.grad(expected.sum(), without)[0])
    assert gradient[:, [1, 3]].tolist() == [[0.0, 0.0]]


def test_a_token_that_only_one_can_say():
    # π cannot say token 1: 0 · log 0 = 0, so KL = ln 1/½. The other way round it is infinite, and no gradient.
    one, two = torch.tensor([[0.0, -math.inf]], requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    assert full_kl(one, two).item() == pytest.approx(math.log(2))
    infinite = full_kl(two, one)
    assert infinite.item() == math.inf
    assert torch.autograd.grad(infinite.sum(), two)[0].tolist() == [[0.0, 0.0]]


@settings(max_examples=30)
@given(
    seed=seeds,
    garbage=st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38]),
    place=st.sampled_from(["state", "entry"]),
    whose=st.sampled_from(["logits", "ref_logits"]),
)
def test_garbage_in_one_state_leaves_no_trace_in_the_others_or_in_its_own_gradient(
    seed, garbage, place, whose
):
    tensors = {
        name: torch.tensor(array, dtype=torch.float32)
        for name, array in zip(("logits", "ref_logits"), random_logits(seed, (3, 4)), strict=True)
    }
    clean = full_kl(**tensors)
    tensors[whose][1, ... if place == "state" else 2] = garbage
    leaf = tensors["logits"].requires_grad_()
    dirty = full_kl(leaf, tensors["ref_logits"])
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
    kept = torch.where(torch.tensor([True, False, True]), dirty, 0.0)
    gradient = torch.autograd.grad(kept.sum(), leaf)[0]
    assert gradient.isfinite().all() and gradient[1].tolist() == [0.0] * 4
    if math.isnan(garbage):
        assert dirty[1].isnan()  # and is not hidden where it is a response token


def test_equal_logits_give_0_and_large_vocabularies_stay_accurate_in_float32():
    logits, ref_logits = random_logits(5, (2, 20_000))
    single = [torch.tensor(array, dtype=torch.float32) for array in (logits, ref_logits)]
    assert full_kl(single[0], single[0]).tolist() == [0.0, 0.0]
    assert (full_kl(single[0], single[0] + 7) > -1e-5).all()
    expected = [kl_by_definition(logits[row].tolist(), ref_logits[row].tolist()) for row in range(2)]
    np.testing.assert_allclose(full_kl(*single).numpy(), expected, rtol=1e-5)


def test_the_reference_gets_no_gradient_half_precision_is_widened_and_shapes_are_refused():
    ref = torch.zeros(2, 3, requires_grad=True)
    assert not full_kl(torch.ones(2, 3), ref).requires_grad
    assert full_kl(torch.ones(2, 3, dtype=torch.bfloat16), ref.bfloat16()).dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"ref_logits has shape \(1, 3\); it must be that of logits, \(2, 3\)"
    ):
        full_kl(torch.ones(2, 3), torch.zeros(1, 3))
