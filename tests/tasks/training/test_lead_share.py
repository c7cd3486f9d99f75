"""The share of a teacher's lead equals a hand-worked one and NumPy's, and its interval contains the truth as often as it promises."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import t as student

from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.interval_formulas import fieller
from vantage.schemas.records.uncertainty import interval_of
from vantage.schemas.records.verdicts import check_gate
from vantage.tasks.training.lead_share import lead_share
from vantage.tasks.training.measured import uncertainty_of, values_of
from vantage.tasks.training.resampling import CONFIDENCES

PROMPTS = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 4, 5])
BEFORE = torch.tensor([0.1, 0.3, 0.2, 0.0, 0.5, 0.4, 0.1, 0.2, 0.3, 0.0], dtype=torch.float64)
AFTER = torch.tensor([0.5, 0.6, 0.9, 0.4, 0.7, 0.4, 0.8, 0.3, 0.6, 0.2], dtype=torch.float64)
TEACHER = torch.tensor([0.9, 0.8, 0.9, 0.7, 0.9, 1.0, 0.8, 0.6, 0.7, 0.9], dtype=torch.float64)


def moments(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Return both means, and the covariance matrix of the two means over prompts, by a plain loop."""
    rows, prompts = len(numerators), PROMPTS.numpy()
    means = np.array([numerators.mean(), denominators.mean()])
    covariance, n = np.zeros((2, 2)), len(set(prompts))
    for prompt in set(prompts):
        own = prompts == prompt
        apart = np.array([numerators[own].sum(), denominators[own].sum()]) - means * own.sum()
        covariance += np.outer(apart, apart)
    return means[0], means[1], covariance * n / (n - 1) / rows**2


def test_a_share_by_hand() -> None:
    """Two prompts of one row have gains 0.2 and 0.4 and leads 0.5 and 0.7, so the share ρ is 0.6/1.2, and the residuals
    g − ρ·l are −0.05 and 0.05."""
    found = lead_share(
        torch.tensor([0.3, 0.5]), torch.tensor([0.1, 0.1]), torch.tensor([0.6, 0.8]), torch.tensor([4, 9])
    )
    assert found.value == pytest.approx(0.5)
    assert found.standard_error == pytest.approx(math.sqrt(2 * (0.05**2 + 0.05**2)) / 1.2)
    assert (found.num_clusters, found.num_rows) == (2, 2)


def test_value_and_intervals_are_those_of_the_definition() -> None:
    """Each kept end is a root of |g − ρ·l| = t·√Var(g − ρ·l), found by bisection."""
    found = lead_share(AFTER, BEFORE, TEACHER, PROMPTS)
    gain, lead, covariance = moments((AFTER - BEFORE).numpy(), (TEACHER - BEFORE).numpy())
    assert found.value == pytest.approx(gain / lead)
    assert (found.num_clusters, found.num_rows) == (6, 10)
    direction = np.array([1, -gain / lead])
    assert found.standard_error == pytest.approx(math.sqrt(direction @ covariance @ direction) / lead)
    assert [confidence for confidence, _, _ in found.intervals] == [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99]
    for confidence, low, high in found.intervals:
        t = student.ppf((1 + confidence) / 2, 5)

        def apart(share: float, t: float = t) -> float:
            along = np.array([1, -share])
            return float((gain - share * lead) ** 2 - t**2 * along @ covariance @ along)

        assert low == pytest.approx(brentq(apart, -10, gain / lead), abs=1e-9)
        assert high == pytest.approx(brentq(apart, gain / lead, 10), abs=1e-9)


@pytest.mark.parametrize("teacher", [BEFORE, BEFORE - 0.1])
def test_without_a_lead_there_is_no_share_and_the_gate_is_closed_for_that_reason(
    teacher: torch.Tensor,
) -> None:
    found = {"teacher_lead_share": lead_share(AFTER, BEFORE, teacher, PROMPTS)}
    assert values_of(found) == {"teacher_lead_share": None}
    for gate in ({"at_least": 0.5}, {"at_most": 2.0}, {"at_least": -5.0, "confidence": 0.9}):
        verdict = check_gate(
            Gate(metric="teacher_lead_share", **gate), values_of(found), uncertainty_of(found)
        )
        assert not verdict.passed
        assert verdict.reason is not None and "no higher than the student before training" in str(verdict)


def test_a_lead_that_may_be_chance_has_no_interval_at_that_confidence() -> None:
    """The lead is 2.2 standard errors, so there is an interval at 80 % (t = 1.48) and none at 95 % (t = 2.57)."""
    gain, lead = np.array([0.2, 0.1, 0.3, 0.0, 0.2, 0.1]), np.array([1.0, 0.0, 0.9, -0.3, 0.8, 0.4])
    prompts = torch.arange(6)
    ratio = lead.mean() / (lead.std(ddof=1) / math.sqrt(6))
    assert student.ppf(0.9, 5) < ratio < student.ppf(0.975, 5)
    zeros = torch.zeros(6)
    found = {"teacher_lead_share": lead_share(torch.tensor(gain), zeros, torch.tensor(lead), prompts)}
    kept = [confidence for confidence, _, _ in found["teacher_lead_share"].intervals]
    assert kept == [each for each in CONFIDENCES if student.ppf((1 + each) / 2, 5) < ratio], (
        "0.95 and above are not bounded"
    )
    known = uncertainty_of(found)
    value = found["teacher_lead_share"].value
    assert interval_of("teacher_lead_share", value, known["teacher_lead_share"], confidence=0.8) is not None
    gate = Gate(metric="teacher_lead_share", at_least=0.01, confidence=0.95)
    verdict = check_gate(gate, values_of(found), known)
    assert not verdict.passed and verdict.interval is None
    assert "the teacher's lead is not clearly above 0" in str(verdict)
    assert check_gate(gate.model_copy(update={"confidence": None}), values_of(found), known).passed


def test_a_gate_compares_the_end_of_the_interval() -> None:
    found = {"teacher_lead_share": lead_share(AFTER, BEFORE, TEACHER, PROMPTS)}
    known, value = uncertainty_of(found), found["teacher_lead_share"].value
    [(low, high)] = [
        (low, high) for confidence, low, high in found["teacher_lead_share"].intervals if confidence == 0.9
    ]
    assert low < value < high
    for bound, passed in ((low - 1e-6, True), (low + 1e-6, False)):
        gate = Gate(metric="teacher_lead_share", at_least=bound, confidence=0.9)
        verdict = check_gate(gate, values_of(found), known)
        assert (verdict.passed, verdict.method, verdict.interval) == (passed, "fieller", (low, high))


def test_one_prompt_has_a_share_and_no_interval() -> None:
    found = lead_share(AFTER, BEFORE, TEACHER, torch.zeros(10, dtype=torch.int64))
    assert found.value == pytest.approx(((AFTER - BEFORE).sum() / (TEACHER - BEFORE).sum()).item())
    assert math.isnan(found.standard_error) and found.intervals == ()


def test_an_interval_holds_the_truth_as_often_as_it_promises() -> None:
    """Gains and leads of 12 prompts are correlated and normal, with a true share of 0.6. Over 4,000 draws at 90 %, four
    standard deviations are 0.019."""
    rng = np.random.default_rng(1)
    covariance = np.array([[0.3, 0.15], [0.15, 0.4]])
    t, holds = student.ppf(0.95, 11), 0
    for _ in range(4000):
        drawn = rng.multivariate_normal([0.6, 1.0], covariance, size=12)
        (of_gain, both), (_, of_lead) = np.cov(drawn.T) / 12
        gain, lead = drawn.mean(axis=0)
        found = fieller(gain, lead, (of_gain, of_lead), both, t)
        holds += found is None or found[0] <= 0.6 <= found[1]
    assert abs(holds / 4000 - 0.9) < 0.019
