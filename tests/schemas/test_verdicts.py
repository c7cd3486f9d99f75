"""A gate opens for what meets its bound, and for nothing else."""

import pytest

from schemas.recipe import Gate
from schemas.verdicts import Verdict, judge

AT_LEAST = Gate(metric="explained_variance", at_least=0.3)
AT_MOST = Gate(metric="kl_to_reference", at_most=5, on_fail="continue")


@pytest.mark.parametrize(("measured", "passed"), [(0.31, True), (0.3, True), (0.2999, False), (-11.0, False)])
def test_at_least(measured: float, passed: bool) -> None:
    assert judge(AT_LEAST, {"explained_variance": measured}).passed is passed


@pytest.mark.parametrize(("measured", "passed"), [(4.9, True), (5.0, True), (5.001, False)])
def test_at_most(measured: float, passed: bool) -> None:
    assert judge(AT_MOST, {"kl_to_reference": measured}).passed is passed


@pytest.mark.parametrize("measured", [None, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("gate", [AT_LEAST, AT_MOST])
def test_closed_for_what_is_no_number(gate: Gate, measured: float | None) -> None:
    verdict = judge(gate, {gate.metric: measured, "other": float("nan")})
    assert not verdict.passed
    assert verdict.measured is None
    assert verdict.evidence == {gate.metric: None, "other": None}
    assert "undefined" in str(verdict)


def test_a_verdict_carries_its_evidence_through_json() -> None:
    verdict = judge(AT_MOST, {"kl_to_reference": 6.0, "validation_score": 1.5})
    assert verdict == Verdict(
        passed=False,
        metric="kl_to_reference",
        measured=6.0,
        relation="<=",
        threshold=5.0,
        on_fail="continue",
        evidence={"kl_to_reference": 6.0, "validation_score": 1.5},
    )
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_a_metric_that_was_not_measured_is_refused() -> None:
    with pytest.raises(
        ValueError, match="explained_variance' was not measured; measured: best_step, value_bias"
    ):
        judge(AT_LEAST, {"value_bias": 0.0, "best_step": 3.0})


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (0.41, "explained_variance 0.410 >= 0.3: passed"),
        (0.3, "explained_variance 0.300 >= 0.3: passed"),
        (0.29996, "explained_variance 0.29996 >= 0.3: CLOSED"),
        (-0.5, "explained_variance -0.500 >= 0.3: CLOSED"),
    ],
)
def test_the_print_never_contradicts_the_verdict(measured: float, said: str) -> None:
    assert str(judge(AT_LEAST, {"explained_variance": measured})) == said
