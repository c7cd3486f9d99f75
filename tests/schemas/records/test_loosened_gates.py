"""A gate that closed is loosened by a lower bound, less confidence, a weaker ``on_fail``, or by leaving it out."""

from tests.support.every import every
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.loosened_gates import loosened_gates
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.schemas.records.verdicts import Verdict, check_gate

METRICS = {"accuracy_gain": 0.03, "perplexity_ratio": 0.99}
KNOWN = {
    "accuracy_gain": Uncertainty(n=400, rows=400, standard_error=0.01, differing=0.04),
    "perplexity_ratio": Uncertainty(n=400, rows=400, standard_error=0.01),
}


def judged(metric: str = "accuracy_gain", **gate: object) -> Verdict:
    return check_gate(Gate.model_validate({"metric": metric, **gate}), METRICS, KNOWN)


CLOSED = judged(at_least=0.05, confidence=0.95)


@every(
    ("now", "text"),
    [
        ([judged(at_least=0.0, confidence=0.95)], "accuracy_gain passed at >= 0 at 95 %; closed at >= 0.05 at 95 % in run 0001"),
        ([judged(at_least=0.02)], "accuracy_gain passed at >= 0.02; closed at"),
        ([judged(at_least=0.05, confidence=0.95, on_fail="continue")], "is closed at >= 0.05 at 95 % and lets the run go on; closed"),
        ([judged(at_least=0.05, confidence=0.95, on_fail="approve")], "asks a person; closed at >= 0.05 at 95 % in run 0001, where a closed gate stops the run"),
        ([], "accuracy_gain has no gate any longer; closed at >= 0.05"),
        ([judged("perplexity_ratio", at_most=1.5)], "accuracy_gain has no gate any longer"),
        ([judged("perplexity_ratio", at_least=0.9, confidence=0.95)], "accuracy_gain has no gate any longer"),
        ([judged(at_most=0.5)], "accuracy_gain has no gate any longer"),
    ],
)  # fmt: skip
def test_asking_less_is_found(now: list[Verdict], text: str) -> None:
    [found] = loosened_gates(now, [("0001", CLOSED)])
    assert text in str(found)


@every(
    "now",
    [
        [CLOSED],
        [judged(at_least=0.06, confidence=0.95)],
        [judged(at_least=0.05, confidence=0.99)],
        [judged(at_least=0.0), judged(at_least=0.05, confidence=0.95)],  # one more gate beside the same one
        [judged(at_least=0.0), judged("perplexity_ratio", at_most=0.5)],  # the run stops at another gate
    ],
)
def test_asking_as_much_is_not(now: list[Verdict]) -> None:
    assert loosened_gates(now, [("0001", CLOSED)]) == ()


def test_an_upper_bound_is_loosened_upwards() -> None:
    closed = judged("perplexity_ratio", at_most=0.9)
    assert loosened_gates([judged("perplexity_ratio", at_most=0.8, on_fail="stop")], [("0001", closed)]) == ()
    [found] = loosened_gates([judged("perplexity_ratio", at_most=1.1)], [("0001", closed)])
    assert str(found) == "perplexity_ratio passed at <= 1.1; closed at <= 0.9 in run 0001"


def test_the_same_bound_with_less_confidence_is_less() -> None:
    closed = judged(at_least=0.025, confidence=0.95)
    [found] = loosened_gates([judged(at_least=0.025)], [("0001", closed)])
    assert str(found) == "accuracy_gain passed at >= 0.025; closed at >= 0.025 at 95 % in run 0001"


def test_what_passed_before_is_no_closed_gate() -> None:
    assert loosened_gates([], [("0001", judged(at_least=0.0))]) == ()


def test_each_gate_is_named_once_with_the_first_run_that_it_closed() -> None:
    strict = judged(at_least=0.2)
    found = loosened_gates([judged(at_least=0.0)], [("0001", CLOSED), ("0002", CLOSED), ("0003", strict)])
    assert [(each.run_id, each.closed.threshold) for each in found] == [("0001", 0.05), ("0003", 0.2)]
