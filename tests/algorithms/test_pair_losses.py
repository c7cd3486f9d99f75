"""IPO, label smoothing, length-normalised DPO, SimPO and ORPO equal hand-worked values, the papers' formulas, and another library."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.algorithms.pair_cases import NUM_CASES, PairCase, means, pair_case, recorded
from vantage.algorithms.pair_losses import ipo, log_odds, orpo, simpo
from vantage.algorithms.preference_loss import DPOLoss, dpo, logistic_losses


def double(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def softplus(x: float) -> float:
    """Return −log σ(−x), without overflow."""
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def sums_of(case: PairCase) -> tuple[Tensor, Tensor, Tensor]:
    return double(case.rejected), double(case.ref_chosen), double(case.ref_rejected)


def means_of(case: PairCase) -> tuple[Tensor, Tensor, Tensor]:
    return (
        double(means(case.rejected, case.rejected_lengths)),
        double(means(case.ref_chosen, case.chosen_lengths)),
        double(means(case.ref_rejected, case.rejected_lengths)),
    )


OURS: dict[str, tuple[bool, Callable[[Tensor, PairCase], DPOLoss]]] = {
    "dpo": (False, lambda chosen, case: dpo(chosen, *sums_of(case), beta=case.beta)),
    "cdpo": (
        False,
        lambda chosen, case: dpo(
            chosen, *sums_of(case), beta=case.beta, label_smoothing=case.label_smoothing
        ),
    ),
    "ln_dpo": (True, lambda chosen, case: dpo(chosen, *means_of(case), beta=case.beta)),
    "ipo": (False, lambda chosen, case: ipo(chosen, *sums_of(case), beta=case.beta)),
    "ln_ipo": (True, lambda chosen, case: ipo(chosen, *means_of(case), beta=case.beta)),
    "simpo": (
        True,
        lambda chosen, case: simpo(
            chosen, means_of(case)[0], beta=case.beta, target_margin=case.target_margin
        ),
    ),
    "smoothed_simpo": (
        True,
        lambda chosen, case: simpo(
            chosen,
            means_of(case)[0],
            beta=case.beta,
            target_margin=case.target_margin,
            label_smoothing=case.label_smoothing,
        ),
    ),
    "orpo": (True, lambda chosen, case: orpo(chosen, means_of(case)[0], beta=case.beta)),
}


@pytest.mark.parametrize("name", OURS)
def test_a_thousand_cases_equal_the_recorded_losses_and_slopes_of_trl(name: str) -> None:
    takes_means, ours = OURS[name]
    expected = recorded()[name]
    assert len(expected) == NUM_CASES
    for number, (loss, slope) in enumerate(expected):
        case = pair_case(number)
        chosen = double(means(case.chosen, case.chosen_lengths) if takes_means else case.chosen)
        found = ours(chosen.requires_grad_(), case).loss
        (slopes,) = torch.autograd.grad(found, chosen)
        assert math.isclose(found.item(), loss, rel_tol=1e-9, abs_tol=1e-12), number
        assert math.isclose(slopes[0].item(), slope, rel_tol=1e-6, abs_tol=1e-12), number


def test_ipo_by_hand() -> None:
    """The IPO loss equals the one worked out in the comment."""
    # β = 0.25: the goal is h = 2. Pair 0: h = (−1 + 2) − (−3 + 1) = 3, so 1². Pair 1: h = 0 − 0, so 2².
    chosen = double([-1.0, -4.0]).requires_grad_()
    result = ipo(chosen, double([-3.0, -5.0]), double([-2.0, -4.0]), double([-1.0, -5.0]), beta=0.25)
    assert result.loss.item() == pytest.approx((1 + 4) / 2)
    assert result.pair_accuracy.mean() == 0.5
    assert result.reward_gap.mean() == pytest.approx(0.25 * 3 / 2)
    # 2·(h − 2)/N: beyond the goal the gap is pushed back
    assert torch.autograd.grad(result.loss, chosen)[0].tolist() == pytest.approx([1.0, -2.0])


def test_label_smoothing_by_hand() -> None:
    # σ(ln 3) = ¾. ε = 0.1: −0.9·ln ¾ − 0.1·ln ¼
    gap = double([math.log(3)])
    assert logistic_losses(gap, label_smoothing=0.1).item() == pytest.approx(
        -0.9 * math.log(0.75) - 0.1 * math.log(0.25)
    )


def test_a_smoothed_loss_has_its_minimum_where_the_model_is_as_unsure_as_the_labels() -> None:
    # Mitchell's note: σ(gap) = 1 − ε
    gap = double([math.log(0.8 / 0.2)]).requires_grad_()
    (slope,) = torch.autograd.grad(logistic_losses(gap, label_smoothing=0.2).sum(), gap)
    assert slope.item() == pytest.approx(0, abs=1e-12)


def test_simpo_by_hand() -> None:
    """The SimPO loss equals the one worked out in the comment."""
    # β = 2, γ = 1. Pair 0: 2·(−0.5 + 1.5) − 1 = 1. Pair 1: 2·(−1 + 0.5) − 1 = −2.
    chosen, rejected = double([-0.5, -1.0]).requires_grad_(), double([-1.5, -0.5])
    result = simpo(chosen, rejected, beta=2.0, target_margin=1.0)
    assert result.loss.item() == pytest.approx((softplus(-1.0) + softplus(2.0)) / 2)
    assert result.pair_accuracy.mean() == 0.5
    assert result.reward_gap.mean() == pytest.approx((2.0 - 1.0) / 2), "without the margin"
    slopes = torch.autograd.grad(result.loss, chosen)[0].tolist()
    assert slopes == pytest.approx([-2 / (1 + math.e) / 2, -2 / (1 + math.exp(-2)) / 2])


def test_orpo_by_hand() -> None:
    """The ORPO loss equals the one worked out in the comment."""
    # P = ¾ and ½: odds 3 and 1, ratio 3, σ(ln 3) = ¾. The other pair the other way round: σ(−ln 3) = ¼.
    likely, even = math.log(0.75), math.log(0.5)
    result = orpo(double([likely, even]), double([even, likely]), beta=0.2)
    assert result.loss.item() == pytest.approx(0.2 * -(math.log(0.75) + math.log(0.25)) / 2)
    assert result.pair_accuracy.mean() == 0.5
    assert result.reward_gap.sum.item() == pytest.approx(0, abs=1e-12)
    assert log_odds(double([likely])).item() == pytest.approx(math.log(3))


def test_the_odds_of_a_certain_response_are_finite_and_of_an_unlikely_one_its_probability() -> None:
    certain = torch.tensor([0.0, -1e-9], requires_grad=True)
    odds = log_odds(certain)
    assert odds.isfinite().all() and odds[0] > 15
    assert torch.autograd.grad(odds.sum(), certain)[0].isfinite().all()
    assert log_odds(torch.tensor([-400.0])).item() == pytest.approx(-400)
    assert log_odds(torch.tensor([-0.5]).bfloat16()).dtype is torch.float32


@pytest.mark.parametrize("name", OURS)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    takes_means, ours = OURS[name]
    case = next(case for number in range(50) if len((case := pair_case(number)).chosen) == 4)
    chosen = double(means(case.chosen, case.chosen_lengths) if takes_means else case.chosen)
    whole = ours(chosen, case)
    leaf = chosen.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(ours(leaf, case).loss, leaf)
    step = 1e-6
    for place in range(len(chosen)):
        nudge = torch.zeros_like(chosen)
        nudge[place] = step
        slope = (ours(chosen + nudge, case).loss - ours(chosen - nudge, case).loss) / (2 * step)
        assert gradient[place].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-8)
    assert whole.reward_gap.count == whole.pair_accuracy.count == 4


def test_wrong_arguments_are_refused() -> None:
    one, two = double([-1.0]), double([-1.0, -2.0])
    with pytest.raises(ValueError, match=r"rejected_mean_logprobs has shape \(2,\)"):
        simpo(one, two, beta=2.0, target_margin=1.0)
    with pytest.raises(ValueError, match=r"ref_rejected_logprobs has shape \(2,\)"):
        ipo(one, one, one, two, beta=0.1)
    with pytest.raises(ValueError, match="beta=0 is not positive"):
        orpo(one, one, beta=0)
    with pytest.raises(ValueError, match=r"label_smoothing=0\.5 is not in \[0, 0\.5\)"):
        dpo(one, one, one, one, beta=0.1, label_smoothing=0.5)
    with pytest.raises(ValueError, match="there is no pair"):
        orpo(double([]), double([]), beta=0.1)
