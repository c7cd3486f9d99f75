"""The KTO loss equals hand-worked values, the paper's formula, and another library's loss."""

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.pair_cases import NUM_CASES, PairCase, pair_case, recorded
from vantage.algorithms.kto_loss import KTOLoss, clamped_kl, kto
from vantage.algorithms.metrics import SumCount, sum_count


def double(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def on_case(chosen: Tensor, case: PairCase) -> KTOLoss:
    """Return the loss on a case: the chosen responses are desirable, the rejected ones are not."""
    log_ratios = double(case.mismatched)
    return kto(
        torch.cat([chosen, double(case.rejected)]),
        double([*case.ref_chosen, *case.ref_rejected]),
        torch.arange(2 * len(chosen)) < len(chosen),
        reference_point=clamped_kl(sum_count(log_ratios, torch.ones_like(log_ratios, dtype=torch.bool))),
        beta=case.beta,
        desirable_weight=case.weights[0],
        undesirable_weight=case.weights[1],
    )


def test_a_thousand_cases_equal_the_recorded_losses_and_slopes_of_trl() -> None:
    expected = recorded()["kto"]
    assert len(expected) == NUM_CASES
    for number, (loss, slope) in enumerate(expected):
        case = pair_case(number)
        chosen = double(case.chosen).requires_grad_()
        found = on_case(chosen, case).loss
        (slopes,) = torch.autograd.grad(found, chosen)
        assert math.isclose(found.item(), loss, rel_tol=1e-9, abs_tol=1e-12), number
        assert math.isclose(slopes[0].item(), slope, rel_tol=1e-6, abs_tol=1e-12), number


def test_by_hand() -> None:
    """The KTO loss and its metrics equal those worked out in the comment."""
    # β = 0.5, z = 2. Desirable: log-ratio 2 + 2·ln 3, margin ln 3, σ = ¾. Undesirable: the same log-ratio, margin −ln 3, σ = ¼.
    ratio = 2 + 2 * math.log(3)
    logprobs = double([-5.0, -7.0]).requires_grad_()
    result = kto(
        logprobs,
        double([-5.0 - ratio, -7.0 - ratio]),
        torch.tensor([True, False]),
        reference_point=2.0,
        beta=0.5,
        desirable_weight=2.0,
        undesirable_weight=3.0,
    )
    assert result.loss.item() == pytest.approx((2 * 0.25 + 3 * 0.75) / 2)
    assert result.desirable_margin.mean() == pytest.approx(math.log(3))
    assert result.undesirable_margin.mean() == pytest.approx(-math.log(3))
    # ∇ of w·(1 − σ(m)) is −w·σ(m)·σ(−m)·β by the log-ratio, with the other sign for an undesirable one; σ(m)·σ(−m) = 3/16
    slopes = torch.autograd.grad(result.loss, logprobs)[0].tolist()
    assert slopes == pytest.approx([-2 * 3 / 16 * 0.5 / 2, 3 * 3 / 16 * 0.5 / 2])


def test_the_papers_value_function() -> None:
    """The KTO loss equals the paper's value function (eq. 7)."""
    # Eq. 7: L = E[λ_y − v], v = λ_D·σ(β(r − z)) or λ_U·σ(β(z − r))
    case = pair_case(17)
    z = max(0.0, sum(case.mismatched) / len(case.mismatched))
    sides = (
        (case.chosen, case.ref_chosen, 1, case.weights[0]),
        (case.rejected, case.ref_rejected, -1, case.weights[1]),
    )
    losses = []
    for logprobs, references, sign, weight in sides:
        for logprob, reference in zip(logprobs, references, strict=True):
            value = weight / (1 + math.exp(-sign * case.beta * (logprob - reference - z)))
            losses.append(weight - value)
    assert on_case(double(case.chosen), case).loss.item() == pytest.approx(sum(losses) / len(losses))


def test_the_reference_point_is_the_mean_of_the_mismatched_log_ratios_but_not_below_0() -> None:
    def of(values: list[float]) -> float:
        return clamped_kl(sum_count(double(values), torch.ones(len(values), dtype=torch.bool)))

    assert of([3.0, -1.0]) == 1.0
    assert of([-3.0, 1.0]) == 0.0
    assert clamped_kl(SumCount(torch.tensor(0.0), torch.tensor(0))) == 0.0, "no mismatched response"


def test_micro_batches_add_up_and_masked_labels_do_not_mix() -> None:
    logprobs, references = double([-1.0, -2.0, -3.0]), double([-2.0, -2.5, -1.0])
    labels = torch.tensor([True, False, True])

    def part(rows: slice) -> KTOLoss:
        return kto(
            logprobs[rows], references[rows], labels[rows], reference_point=0.3, beta=0.7, denominator=3.0
        )

    whole, first, second = part(slice(None)), part(slice(1)), part(slice(1, 3))
    assert (first.loss + second.loss).item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert (first.desirable_margin + second.desirable_margin).mean() == pytest.approx(
        whole.desirable_margin.mean()
    )
    assert whole.desirable_margin.count == 2 and whole.undesirable_margin.count == 1


def test_extreme_margins_keep_their_gradient_and_value() -> None:
    logprobs = double([50.0]).requires_grad_()
    result = kto(logprobs, double([0.0]), torch.tensor([True]), reference_point=0.0, beta=1.0)
    assert result.loss.item() == pytest.approx(math.exp(-50), rel=1e-9)


def test_wrong_arguments_are_refused() -> None:
    one, two, label = double([-1.0]), double([-1.0, -2.0]), torch.tensor([True])
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \(2,\)"):
        kto(one, two, label, reference_point=0.0, beta=0.1)
    with pytest.raises(ValueError, match="reference_point=-0.1 is below 0"):
        kto(one, one, label, reference_point=-0.1, beta=0.1)
    with pytest.raises(ValueError, match="beta=0 is not positive"):
        kto(one, one, label, reference_point=0.0, beta=0)
    with pytest.raises(TypeError, match="is_desirable has dtype"):
        kto(one, one, torch.tensor([1]), reference_point=0.0, beta=0.1)
    with pytest.raises(ValueError, match="there is no response"):
        kto(double([]), double([]), torch.tensor([], dtype=torch.bool), reference_point=0.0, beta=0.1)
