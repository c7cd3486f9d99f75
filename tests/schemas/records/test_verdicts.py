"""A gate opens for what meets its bound, and for nothing else."""

import pytest
from pydantic import ValidationError
from scipy.stats import beta

from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.schemas.records.verdicts import Verdict, check_gate, recorded_verdict

AT_LEAST = Gate(metric="explained_variance", at_least=0.3)
AT_MOST = Gate(metric="kl_to_reference", at_most=5, on_fail="continue")


@pytest.mark.parametrize(("measured", "passed"), [(0.31, True), (0.3, True), (0.2999, False), (-11.0, False)])
def test_at_least(measured: float, passed: bool) -> None:
    """A gate with a lower bound opens at the bound and above."""
    assert check_gate(AT_LEAST, {"explained_variance": measured}).passed is passed


@pytest.mark.parametrize(("measured", "passed"), [(4.9, True), (5.0, True), (5.001, False)])
def test_at_most(measured: float, passed: bool) -> None:
    """A gate with an upper bound opens at the bound and below."""
    assert check_gate(AT_MOST, {"kl_to_reference": measured}).passed is passed


@pytest.mark.parametrize("measured", [None, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("gate", [AT_LEAST, AT_MOST])
def test_closed_for_what_is_no_number(gate: Gate, measured: float | None) -> None:
    verdict = check_gate(gate, {gate.metric: measured, "other": float("nan")})
    assert not verdict.passed
    assert verdict.measured is None
    assert verdict.evidence == {gate.metric: None, "other": None}
    assert "undefined" in str(verdict)


def test_a_verdict_carries_its_evidence_through_json() -> None:
    verdict = check_gate(AT_MOST, {"kl_to_reference": 6.0, "validation_score": 1.5})
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
        check_gate(AT_LEAST, {"value_bias": 0.0, "best_step": 3.0})


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
    assert str(check_gate(AT_LEAST, {"explained_variance": measured})) == said


# -- how sure it is

SURE = {"pair_accuracy": Uncertainty(n=32, rows=32, standard_error=0.0807)}


def test_a_verdict_says_how_many_prompts_and_between_what() -> None:
    """The numbers are those of SmolLM2's own gate: 23 of 32 pairs."""
    verdict = check_gate(Gate(metric="pair_accuracy", at_least=0.7), {"pair_accuracy": 23 / 32}, SURE)
    assert (verdict.passed, verdict.n, verdict.standard_error) == (True, 32, 0.0807)
    exact = beta.ppf(0.975, 24, 9)  # the upper end, as wrong pairs are the rarer ones; Wilson's is 0.848
    assert verdict.interval == pytest.approx((0.539, exact), abs=1e-3)
    assert str(verdict) == (
        "pair_accuracy 0.719 [0.54, 0.86] n=32 >= 0.7: passed "
        "(too few to tell: the 95 % interval contains 0.7)"
    )
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_enough_prompts_need_no_warning() -> None:
    sure = {"pair_accuracy": Uncertainty(n=1590, rows=1590, standard_error=0.0015)}
    verdict = check_gate(Gate(metric="pair_accuracy", at_least=0.75), {"pair_accuracy": 0.9964}, sure)
    assert verdict.warning is None
    assert str(verdict) == "pair_accuracy 0.996 [0.992, 0.999] n=1,590 >= 0.75: passed"


@pytest.mark.parametrize(
    ("gate", "measured", "passed"),
    [
        ({"at_least": 0.53}, 23 / 32, True),
        ({"at_least": 0.55}, 23 / 32, False),
        ({"at_most": 0.87}, 23 / 32, True),
        ({"at_most": 0.85}, 23 / 32, False),
    ],
)
def test_with_a_confidence_the_bound_that_lies_nearer_to_failing_is_judged(
    gate: dict[str, float], measured: float, passed: bool
) -> None:
    asked = Gate(metric="pair_accuracy", confidence=0.95, **gate)
    verdict = check_gate(asked, {"pair_accuracy": measured}, SURE)
    assert verdict.passed is passed
    assert verdict.warning is None or "too few to tell" in verdict.warning
    assert f"{asked.relation} {asked.bound:g} at 95 %:" in str(verdict)


def test_a_higher_confidence_asks_for_more() -> None:
    gate = {"metric": "pair_accuracy", "at_least": 0.55}
    closed, passed = (
        check_gate(Gate(**gate, confidence=level), {"pair_accuracy": 23 / 32}, SURE) for level in (0.99, 0.9)
    )
    assert (closed.passed, passed.passed) == (False, True)
    assert closed.warning == "too few to tell: the 99 % interval contains 0.55"


@pytest.mark.parametrize("error", [None, 0.0])
def test_a_confidence_opens_for_no_interval(error: float | None) -> None:
    sure = {"score_gain": Uncertainty(n=1 if error is None else 5, rows=5, standard_error=error)}
    verdict = check_gate(Gate(metric="score_gain", at_least=0.0, confidence=0.95), {"score_gain": 3.0}, sure)
    assert not verdict.passed
    assert verdict.interval is None
    assert "too few to tell" in str(verdict)
    without = check_gate(Gate(metric="score_gain", at_least=0.0, confidence=0.95), {"score_gain": 3.0})
    assert not without.passed


@pytest.mark.parametrize(
    ("metric", "bound"),
    [
        ("accuracy_gain", {"at_least": 0.0}),
        ("win_rate", {"at_least": 0.5}),
        ("score_gain", {"at_most": 1.0}),
        ("accuracy_gain", {"at_least": -1.0}),
    ],
)
def test_a_difference_between_a_model_and_itself_is_never_a_pass(
    metric: str, bound: dict[str, float]
) -> None:
    measured = {"accuracy_gain": 0.0, "win_rate": 0.5, "score_gain": 0.0, "accuracy": 0.9}
    gate = Gate(metric=metric, **bound)
    assert check_gate(gate, measured).passed
    verdict = check_gate(gate, measured, equal="candidate and baseline are the same weights")
    assert not verdict.passed
    assert str(verdict).endswith("CLOSED (candidate and baseline are the same weights)")


def test_what_is_no_difference_is_judged_all_the_same() -> None:
    gate = Gate(metric="accuracy", at_least=0.8)
    assert check_gate(gate, {"accuracy": 0.9}, equal="candidate and baseline are the same weights").passed


@pytest.mark.parametrize("confidence", [95, 1.0, 0.0, "0.95"])
def test_a_confidence_is_a_share(confidence: object) -> None:
    with pytest.raises(ValidationError, match="confidence"):
        Gate.model_validate({"metric": "accuracy", "at_least": 0.5, "confidence": confidence})


def test_a_verdict_of_an_earlier_version_can_still_be_read() -> None:
    old = {"passed": True, "metric": "x", "measured": 1.0, "relation": ">=", "threshold": 0.5, "on_fail": "stop",
           "evidence": {"x": 1.0}}  # fmt: skip
    assert str(Verdict.model_validate(old)) == "x 1.000 >= 0.5: passed"


# -- verdicts of earlier versions

LOST = {"accuracy_gain": -1 / 256}
ONE_OF_256 = {"accuracy_gain": Uncertainty(n=256, rows=256, standard_error=1 / 256)}
NOT_WORSE = Gate(metric="accuracy_gain", at_least=-0.02, confidence=0.95)
EARLIER = Verdict(
    passed=True,
    metric="accuracy_gain",
    measured=-1 / 256,
    relation=">=",
    threshold=-0.02,
    on_fail="stop",
    evidence=LOST,
    n=256,
    standard_error=1 / 256,
    interval=(-1 / 256 - 1.9693 / 256, -1 / 256 + 1.9693 / 256),
    confidence=0.95,
)
"""A verdict of an earlier version, which judged by mean ± t·error."""


def test_more_lost_answers_never_open_a_gate() -> None:
    """With 256 prompts and a bound of −0.02 the gate opens if no answer was lost, and stays closed for 1 to 5."""
    passed = []
    for lost in range(6):
        error = ((lost - lost**2 / 256) / 256 / 255) ** 0.5
        known = {"accuracy_gain": Uncertainty(n=256, rows=256, standard_error=error)}
        passed.append(check_gate(NOT_WORSE, {"accuracy_gain": -lost / 256}, known).passed)
    assert passed == [True, False, False, False, False, False]


def test_a_verdict_records_its_method_and_its_counts() -> None:
    verdict = check_gate(NOT_WORSE, LOST, ONE_OF_256)
    assert (verdict.method, verdict.counts) == ("paired", {"rows": 256})
    known = Uncertainty(n=64, rows=256, standard_error=0.01, differing=0.25, equal_prompts=50.5)
    several = check_gate(NOT_WORSE, {"accuracy_gain": 0.1}, {"accuracy_gain": known})
    assert several.counts == {"rows": 256, "differing_rows": 64, "equal_prompts": 50.5}
    told = Verdict.model_validate_json(several.model_dump_json())
    assert told == several
    assert check_gate(Gate(metric="loss", at_most=1), {"loss": 0.5}).method is None


def test_an_earlier_verdict_is_judged_by_its_own_method() -> None:
    again = check_gate(NOT_WORSE, LOST, ONE_OF_256, like=EARLIER)
    assert again.passed
    assert again.interval == pytest.approx(EARLIER.interval, abs=1e-6)
    assert not check_gate(NOT_WORSE, LOST, ONE_OF_256).passed
    new = check_gate(NOT_WORSE, LOST, ONE_OF_256)
    assert check_gate(NOT_WORSE, LOST, ONE_OF_256, like=new) == new


def test_an_earlier_verdict_is_written_as_it_was() -> None:
    """The JSON of an earlier verdict is in questions that were answered and in signed statements."""
    again = check_gate(NOT_WORSE, LOST, ONE_OF_256, like=EARLIER)
    assert set(again.model_dump(mode="json")) == {
        *(
            "passed",
            "metric",
            "measured",
            "relation",
            "threshold",
            "on_fail",
            "evidence",
            "n",
            "standard_error",
        ),
        *("interval", "confidence", "reason", "warning"),
    }


def test_no_earlier_version_judged_what_it_could_not_measure() -> None:
    """A verdict without a method, on counts that only this version records, has had its method taken away."""
    known = {"accuracy_gain": ONE_OF_256["accuracy_gain"].model_copy(update={"differing": 1 / 256})}
    assert not check_gate(NOT_WORSE, LOST, known, like=EARLIER).passed


def test_a_recorded_verdict_stands_for_its_own_gate() -> None:
    other = Gate(metric="accuracy", at_least=0.5)
    assert recorded_verdict([EARLIER], 0, NOT_WORSE) == EARLIER
    assert recorded_verdict([EARLIER], 0, other) is recorded_verdict([EARLIER], 1, NOT_WORSE) is None


def test_returns_that_nearly_always_are_the_same_close_the_gate() -> None:
    gate = Gate(metric="explained_variance", at_least=0.0, confidence=0.95)
    known = {
        "explained_variance": Uncertainty(n=64, rows=64, standard_error=0.05),
        "value_mse": Uncertainty(n=64, rows=64, standard_error=0.02),
    }
    verdict = check_gate(gate, {"explained_variance": 0.6, "value_mse": 0.04}, known)
    assert not verdict.passed
    assert verdict.counts == {"rows": 64, "carrying_prompts": pytest.approx(4)}
    assert "about 4 prompts carry the squares, 10 are needed" in str(verdict)
    just_enough = {"explained_variance": Uncertainty(n=10, rows=10, standard_error=0.0)}
    closed = check_gate(gate, {"explained_variance": 0.6}, just_enough)
    assert closed.counts["carrying_prompts"] == 10
    assert "prompts that do not differ have no interval" in str(closed)
    more = known | {"value_mse": Uncertainty(n=64, rows=64, standard_error=0.005)}
    assert check_gate(gate, {"explained_variance": 0.6, "value_mse": 0.04}, more).passed
